"""LMDeploy's online KV quantization (``quant_policy=4``): asymmetric per token and head.

Scale and zero point are kept as two fp16 numbers; the zero point is ``-min / scale``, no integer. There is no
3-bit policy: that codec follows the same rule.
"""

from __future__ import annotations

import numpy as np

from kvq.eval.codecs.base import Recode, TensorCodec, fp16, safe


def _per_token(bits: int) -> Recode:
    def through(x: np.ndarray) -> np.ndarray:
        low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
        scale = safe((high - low) / np.float32(2**bits - 1))
        zero = -low / scale
        codes = np.clip(np.floor(x / scale + zero + np.float32(0.5)), 0, 2**bits - 1)
        return (codes - fp16(zero)) * fp16(scale)

    return through


def _codec(bits: int) -> TensorCodec:
    rule = _per_token(bits)
    text = f"{bits}-bit asymmetric per token and head, fp16 scale and zero point"
    return TensorCodec(f"lmdeploy-int{bits}", text, rule, rule, lambda head_dim: bits + 32 / head_dim)


CODECS = (_codec(4), _codec(3))
