"""Qwen3: no biases, a norm of each query and key head, and a head_dim of its own."""

from __future__ import annotations

from typing import Any

from .base import Family, HFConfig
from .qwen2 import upper_layers_slide


def qwen3_attention(config: HFConfig) -> dict[str, Any]:
    """The fields of Qwen3's attention."""
    bias = bool(config.get("attention_bias", False))
    return {
        "attention_bias": bias,
        "attention_output_bias": bias,
        "qk_norm": "head",
        **upper_layers_slide(config),
    }


QWEN3 = Family("qwen3", qwen3_attention, defaults={"head_dim": 128})
