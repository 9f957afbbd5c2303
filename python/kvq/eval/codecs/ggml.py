"""llama.cpp's block formats: 32 channels of a token with an fp16 scale, in ``_1`` formats also a minimum.

Since pull request 21038 llama.cpp rotates a quantized cache by a Hadamard matrix; both ways are here. It
has no 3-bit formats of this kind: those codecs follow the same rule.
"""

from __future__ import annotations

import numpy as np

from kvq.eval.codecs.base import Recode, TensorCodec, fp16, in_groups, rotated, safe

_BLOCK = 32


def _scale_only(bits: int) -> Recode:
    """The element of largest magnitude sits on the most negative code."""
    half = 2 ** (bits - 1)

    def through(x: np.ndarray) -> np.ndarray:
        at = np.abs(x).argmax(axis=-1)[..., None]
        scale = np.take_along_axis(x, at, axis=-1) / np.float32(-half)
        codes = np.minimum(np.floor(x / safe(scale) + np.float32(half + 0.5)), 2**bits - 1)
        return (codes - np.float32(half)) * fp16(scale)

    return through


def _scale_and_minimum(bits: int) -> Recode:
    def through(x: np.ndarray) -> np.ndarray:
        low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
        scale = (high - low) / np.float32(2**bits - 1)
        codes = np.minimum(np.floor((x - low) / safe(scale) + np.float32(0.5)), 2**bits - 1)
        return codes * fp16(scale) + fp16(low)

    return through


def _codec(bits: int, minimum: bool, rotate: bool) -> TensorCodec:
    recode = in_groups((_scale_and_minimum if minimum else _scale_only)(bits), _BLOCK)
    if rotate:
        recode = rotated(recode)
    name = f"llama.cpp-q{bits}_{int(minimum)}" + ("-rotated" if rotate else "")
    what = "fp16 scale and minimum" if minimum else "signed fp16 scale"
    text = f"{bits}-bit, blocks of {_BLOCK} channels, {what}" + (", Hadamard" if rotate else "")
    stored = bits + (32 if minimum else 16) / _BLOCK
    return TensorCodec(
        name, text, recode, recode, lambda head_dim: -(-head_dim // _BLOCK) * _BLOCK * stored / head_dim
    )


CODECS = tuple(
    _codec(bits, minimum, rotate) for bits in (4, 3) for minimum in (False, True) for rotate in (False, True)
)
