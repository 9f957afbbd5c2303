"""The groups of the request that kvq began with (mlc-llm pull request 2663): symmetric, with an fp16 scale.

Codes of 4 bits lie four to a 16-bit word in groups of 32, codes of 3 bits five to a word in groups of 40; a
token's last group is padded. At head_dim 64 and 128 both therefore take 4.5 bits per value.
"""

from __future__ import annotations

import numpy as np

from kvq.eval.codecs.base import Recode, TensorCodec, fp16, in_groups, safe

_WORD_BITS = 16


def _symmetric(bits: int) -> Recode:
    top = np.float32(2 ** (bits - 1) - 1)

    def through(x: np.ndarray) -> np.ndarray:
        scale = np.abs(x).max(axis=-1, keepdims=True) / top
        codes = np.clip(np.rint(x / safe(scale)), -top, top)
        return codes * fp16(scale)

    return through


def _codec(bits: int, group: int) -> TensorCodec:
    recode = in_groups(_symmetric(bits), group)

    def stored(head_dim: int) -> float:
        words = group // (_WORD_BITS // bits) + 1
        return -(-head_dim // group) * words * _WORD_BITS / head_dim

    return TensorCodec(
        f"mlc-int{bits}",
        f"{bits}-bit symmetric, groups of {group} channels, fp16 scale",
        recode,
        recode,
        stored,
    )


CODECS = (_codec(4, 32), _codec(3, 40))
