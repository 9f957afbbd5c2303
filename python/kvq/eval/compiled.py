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
        """Whether the library's sealed pages hold codes."""
        return self.layout.k_bits is not None or self.layout.v_bits is not None

    def quantized_keys(self, positions: np.ndarray) -> np.ndarray:
        """Of the keys that rows at int64 ``positions`` ``[n]`` attend to, how many were codes."""
        page = self.layout.page_size
        return positions // page * page if self.quantized else np.zeros_like(positions)

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
    is written lose less here than they would where they are at home: :class:`HomePrefiller`.
    """

    def __init__(self, model: LoadedModel, codec: Codec) -> None:
        super().__init__(model)
        if self.quantized:
            raise ValueError("a codec needs a cache that holds rows")
        self._codec = codec
        self._pool = np.from_dlpack(model.tensors.pool)

    @property
    def description(self) -> str:
        """How sealed pages are stored, in a line."""
        return self._codec.description

    def quantized_keys(self, positions: np.ndarray) -> np.ndarray:
        """Of the keys that rows at int64 ``positions`` ``[n]`` attend to, how many were codes."""
        return positions // self.layout.page_size * self.layout.page_size

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


class HomePrefiller(CodecPrefiller):
    """A loaded model whose tokens pass through a codec, one by one, as soon as they are written.

    Steps are of one token. A query reads every token before its own decoded; its own key and value alone are
    as they came, which is still kinder than most formats are at home.
    """

    def __init__(self, model: LoadedModel, codec: Codec) -> None:
        super().__init__(model, codec)
        if not codec.per_token or self.layout.order != "lanes":
            raise ValueError("needs a codec that works token by token, and pages in lanes")
        self._open = np.from_dlpack(model.tensors.open)

    @property
    def description(self) -> str:
        """How pages are stored, in a line."""
        return f"{super().description}; every token coded when written"

    def quantized_keys(self, positions: np.ndarray) -> np.ndarray:
        """Of the keys that rows at int64 ``positions`` ``[n]`` attend to, how many were codes."""
        return positions

    def prefill(self, ids: np.ndarray, logit_rows: np.ndarray) -> np.ndarray:
        """Append int32 ``ids`` ``[n]``; the logits float32 ``[m, vocab]`` of ``logit_rows`` ``[m]``."""
        wanted, logits = set(logit_rows.tolist()), []
        for at in range(len(ids)):
            found = self._model.step([(_SEQUENCE, 1)], ids[at : at + 1])
            if at in wanted:
                logits.append(found)
            self._recode_last()
        return np.concatenate(logits)

    def _recode_last(self) -> None:
        """Replace the row that was just written, in the open page or in the page that it filled."""
        layout, sequence = self.layout, self._model.cache.sequence(_SEQUENCE)
        offset, page, dim = (sequence.length - 1) % layout.page_size, layout.page_size, layout.head_dim
        if offset == page - 1:
            rows = self._pool[sequence.pages[-1]].view(layout.row_dtype)
            parts = rows[..., : page * dim], rows[..., page * dim :]
        else:
            rows = self._open[sequence.open_page]
            parts = rows[..., 0, :], rows[..., 1, :]
        k = parts[0].reshape(*rows.shape[:2], dim, page)[..., offset]
        v = parts[1].reshape(*rows.shape[:2], page, dim)[..., offset, :]
        new_k, new_v = self._codec.round_trip(
            k[..., None, :].astype(np.float32), v[..., None, :].astype(np.float32)
        )
        k[...], v[...] = new_k[..., 0, :], new_v[..., 0, :]
