"""A compiled model as the evaluation drives it: one sequence, all logits that are asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvq.eval.codecs import Codec
from kvq.layout import KVLayout
from kvq.quantization.kv_codec import seal_unit, unpack_unit
from kvq.runtime.loaded_model import LoadedModel

_SEQUENCE = 0


class CompiledPrefiller:
    """One sequence of a loaded model; satisfies :class:`kvq.eval.perplexity.Prefiller`."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    @property
    def layout(self) -> KVLayout:
        """The layout of the model's cache."""
        return self._model.layout

    @property
    def description(self) -> str:
        """How sealed pages are stored, in a line."""
        layout = self.layout
        if not self.quantized:
            return f"K and V as {layout.row_dtype} rows"
        k, v = (f"{bits}-bit" if bits else layout.row_dtype for bits in (layout.k_bits, layout.v_bits))
        return f"{k} K per channel of a page, {v} V per token, pages of {layout.page_size} tokens"

    @property
    def quantized(self) -> bool:
        """Whether sealed pages hold codes."""
        return self.layout.k_bits is not None or self.layout.v_bits is not None

    def bits_per_value(self, head_dim: int) -> float:
        """Bits that a sealed page stores per value at a head_dim, everything included."""
        return replace(self.layout, head_dim=head_dim).bits_per_value

    def reset(self) -> None:
        """Empty the sequence."""
        if _SEQUENCE in self._model.cache:
            self._model.cache.remove_sequence(_SEQUENCE)
        self._model.cache.add_sequence(_SEQUENCE)

    def prefill(self, ids: np.ndarray, logit_rows: np.ndarray) -> np.ndarray:
        """Append int32 ``ids`` ``[n]``; the logits float32 ``[m, vocab]`` of ``logit_rows`` ``[m]``."""
        return self._model.step([(_SEQUENCE, len(ids))], ids, logit_rows.tolist())


class CodecPrefiller(CompiledPrefiller):
    """A loaded model with an unquantized cache, whose pages pass through a codec as they are sealed.

    Attention is the compiled library's. A step ends at a page's end; then every layer and head of the page
    just sealed is replaced by its round trip. So a query reads decoded pages up to its own, and the rows of
    its own page as they are, exactly as with kvq's formats. Formats that would quantize a token as soon as it
    is written lose less here than they would where they are at home.
    """

    def __init__(self, model: LoadedModel, codec: Codec) -> None:
        super().__init__(model)
        if self.layout.k_bits is not None or self.layout.v_bits is not None:
            raise ValueError("a codec needs a cache that holds rows")
        self._codec = codec
        self._pool = np.from_dlpack(model.tensors.pool)

    @property
    def description(self) -> str:
        """How sealed pages are stored, in a line."""
        return self._codec.description

    @property
    def quantized(self) -> bool:
        """Whether sealed pages hold codes."""
        return True

    def bits_per_value(self, head_dim: int) -> float:
        """Bits that the codec's format stores per value at a head_dim, everything included."""
        return self._codec.bits_per_value(head_dim)

    def prefill(self, ids: np.ndarray, logit_rows: np.ndarray) -> np.ndarray:
        """Append int32 ``ids`` ``[n]``; the logits float32 ``[m, vocab]`` of ``logit_rows`` ``[m]``."""
        page, parts, begin = self.layout.page_size, [], 0
        while begin < len(ids):
            length = self._model.cache.length(_SEQUENCE)
            end = min(len(ids), begin + page - length % page)
            rows = logit_rows[(logit_rows >= begin) & (logit_rows < end)] - begin
            # A step that nobody wants logits of still has to fill the cache; it asks for its last row.
            logits = super().prefill(ids[begin:end], rows if len(rows) else np.array([end - begin - 1]))
            parts.append(logits[: len(rows)])
            if (length + end - begin) % page == 0:
                self._recode(self._model.cache.sequence(_SEQUENCE).pages[-1])
            begin = end
        return np.concatenate(parts)

    def _recode(self, page: int) -> None:
        rows = unpack_unit(self._pool[page], self.layout)
        k, v = self._codec.round_trip(rows["k"], rows["v"])
        dtype = self.layout.row_dtype
        self._pool[page] = seal_unit(k.astype(dtype), v.astype(dtype), self.layout)
