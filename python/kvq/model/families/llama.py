"""Llama 2, 3, 3.1 and 3.2, SmolLM2, and everything that says it is one."""

from __future__ import annotations

from typing import Any

from .base import Family, HFConfig


def _fields(config: HFConfig) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {
        "attention_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias", False)),
    }


LLAMA = Family("llama", _fields)
