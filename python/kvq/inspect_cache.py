"""What a quantized cache holds, against the keys and values of the same model with an unquantized one.

Two numbers are told apart. The *format* error is what sealing does to exact keys and values; the
*served* error is what the cache of a running model shows, where the keys and values of deep layers also
differ because the layers below them read a quantized cache. In the first layer the two agree.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvq.compare import Comparison, Report
from kvq.errors import ConfigError
from kvq.layout import KVLayout
from kvq.quantization.kv_codec import hadamard, sanitize, seal_unit, unpack_unit
from kvq.runtime.loaded_model import LoadedModel
from kvq.tokenizer import Tokenizer

_SEQUENCE = "inspected"
REFERENCE = "none"


@dataclass(frozen=True)
class Inspection:
    """The sealed pages of one sequence.

    Attributes
    ----------
    layout : KVLayout
        Of the quantized cache.
    tokens : numpy.ndarray
        int32 ``[n]``: the prompt and what the model added to fill a page.
    num_prompt : int
        Tokens of the prompt among them.
    decoded : dict
        What :func:`kvq.quantization.kv_codec.unpack_unit` returns, with leading axes ``[page, layer, head]``.
    exact_k, exact_v : numpy.ndarray
        float32 ``[page, layer, head, page_size, head_dim]`` of the unquantized cache; V not rotated.
    format_k, format_v : numpy.ndarray
        The same after a trip through the format.
    windows : tuple of int or None
        Tokens that each layer sees; None: all.
    """

    layout: KVLayout
    tokens: np.ndarray
    num_prompt: int
    decoded: dict[str, np.ndarray]
    exact_k: np.ndarray
    exact_v: np.ndarray
    format_k: np.ndarray
    format_v: np.ndarray
    windows: tuple[int | None, ...]

    @property
    def served_k(self) -> np.ndarray:
        """Keys that attention reads, float32, shaped as ``exact_k``."""
        return self.decoded["k"]

    @property
    def served_v(self) -> np.ndarray:
        """Values that attention reads, not rotated, shaped as ``exact_v``."""
        return self.decoded["v_unrotated"]

    def dump(self, path: str | Path) -> None:
        """Write everything to an ``.npz`` file.

        Raises
        ------
        ConfigError
            If the file cannot be written; an earlier one stays as it was.
        """
        arrays: dict[str, Any] = {
            **self.decoded,
            "tokens": self.tokens,
            "exact_k": self.exact_k,
            "exact_v": self.exact_v,
            "format_k": self.format_k,
            "format_v": self.format_v,
        }
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "wb") as file:
                np.savez_compressed(file, **arrays)
            os.replace(temporary, path)
        except OSError as problem:
            temporary.unlink(missing_ok=True)
            raise ConfigError(f"--dump {path}: cannot be written: {problem.strerror}") from None


def relative_error(found: np.ndarray, exact: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Root of the squared error over the squared size, over ``axes``; 0 where both are 0."""
    error = np.square(found.astype(np.float64) - exact).sum(axis=axes)
    size = np.square(exact.astype(np.float64)).sum(axis=axes)
    return np.sqrt(error / np.where(size > 0, size, 1.0))


def through_format(
    k: np.ndarray, v: np.ndarray, layout: KVLayout, widths: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Exact keys and values, float32 ``[..., page_size, head_dim]``, as the format gives them back.

    ``widths`` are those of the key codes, int32 ``[..., head_dim]``; by default the ranges alone decide them.
    """
    rotated = v @ hadamard(layout.head_dim) if layout.v_bits else v
    dtype = np.dtype(layout.row_dtype)
    decoded = unpack_unit(
        seal_unit(sanitize(k).astype(dtype), sanitize(rotated).astype(dtype), layout, widths), layout
    )
    return decoded["k"], decoded["v_unrotated"]


def sealed_pages(model: LoadedModel, sequence: str) -> np.ndarray:
    """Words of a sequence's sealed pages, uint32 ``[page, layer, head, unit_words]``."""
    pages = list(model.cache.sequence(sequence).pages)
    return np.from_dlpack(model.tensors.pool)[pages]


def inspect_prompt(
    model: str,
    prompt: str,
    *,
    kv: str = "int4",
    quantization: str | None = None,
    opt: str = "O1",
    report: Report | None = None,
) -> Inspection:
    """Run a prompt with a quantized and with an unquantized cache, and decode what they sealed.

    A prompt that fills no page is continued greedily, by the model with the unquantized cache, until
    one is full; both caches get the same tokens.

    Parameters
    ----------
    model, quantization, opt : str
        As :class:`kvq.compare.Comparison` takes them.
    kv : str
        Cache scheme to look at.
    report : callable, optional
        Called with what is being done.

    Raises
    ------
    KvqError
        If the prompt is empty, or the model or scheme is unsuitable.
    """
    if kv == REFERENCE:
        raise ConfigError("--kv none stores keys and values as they are: choose int8, int4, int3 or a mix")
    if not prompt:
        raise ConfigError("--prompt is empty: give a text of at least one token")
    comparison = Comparison(model, quantization, [REFERENCE, kv], opt, report)
    ids = Tokenizer.from_dir(comparison.config_dir).encode(prompt)
    chunk = min(comparison.prefill_chunk_size, 256)
    unquantized, quantized = comparison.load(max(len(ids), 128), chunk)
    num_prompt = len(ids)
    logits = _prefill(unquantized, ids, chunk)
    while unquantized.cache.length(_SEQUENCE) < quantized.layout.page_size:
        ids.append(int(logits[-1].argmax()))
        logits = unquantized.step([(_SEQUENCE, 1)], ids[-1:])
    _prefill(quantized, ids, chunk)
    exact = unpack_unit(sealed_pages(unquantized, _SEQUENCE), unquantized.layout)
    decoded = unpack_unit(sealed_pages(quantized, _SEQUENCE), quantized.layout)
    # Queries chose the widths. The format is asked what it does with the same choice.
    format_k, format_v = through_format(exact["k"], exact["v"], quantized.layout, decoded.get("k_widths"))
    return Inspection(
        layout=quantized.layout,
        tokens=np.array(ids, np.int32),
        num_prompt=num_prompt,
        decoded=decoded,
        exact_k=exact["k"],
        exact_v=exact["v"],
        format_k=format_k,
        format_v=format_v,
        windows=tuple(layer.window for layer in quantized.metadata.model.layer_attention),
    )


def _prefill(model: LoadedModel, ids: Sequence[int], chunk: int) -> np.ndarray:
    model.cache.add_sequence(_SEQUENCE)
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        logits = model.step([(_SEQUENCE, len(part))], part)
    return logits
