"""OLMo 2: norms after attention and feed-forward network, and of all heads of q and of k together."""

from __future__ import annotations

from typing import Any

from .base import Family, HFConfig


def _fields(config: HFConfig) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {
        "attention_bias": bias,
        "attention_output_bias": bias,
        "norm_placement": "post",
        "qk_norm": "projection",
    }


OLMO2 = Family("olmo2", _fields)
