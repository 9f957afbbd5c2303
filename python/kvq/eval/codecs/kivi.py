"""KIVI (arXiv 2402.02750): keys per channel over 32 tokens, values per token over 32 channels, asymmetric.

Scale and minimum are fp16. KIVI keeps a residual of the latest tokens as they are; here that is the query's
own page, as for all formats.
"""

from __future__ import annotations

from kvq.eval.codecs.base import TensorCodec, along_tokens, asymmetric, in_groups

_GROUP = 32


def _codec(bits: int) -> TensorCodec:
    rule = asymmetric(bits)
    text = f"{bits}-bit asymmetric, K per channel of {_GROUP} tokens, V per token of {_GROUP} channels, "
    text += "fp16 scale and minimum"
    return TensorCodec(
        f"kivi-int{bits}",
        text,
        along_tokens(rule, _GROUP),
        in_groups(rule, _GROUP),
        lambda head_dim: bits + 32 / _GROUP * (1 + -(-head_dim // _GROUP) * _GROUP / head_dim) / 2,
        per_token=False,
    )


CODECS = (_codec(4), _codec(3), _codec(2))
