"""Qwen2 and Qwen2.5: biases of q, k and v; in some the upper layers slide."""

from __future__ import annotations

from typing import Any

from .base import Family, HFConfig, sliding_layers


def upper_layers_slide(config: HFConfig) -> dict[str, Any]:
    """Qwen's windows: of the layers from ``max_window_layers`` on, if ``use_sliding_window`` says so."""
    if not config.get("use_sliding_window", False):
        return {}
    first = config.get("max_window_layers", 28)
    return sliding_layers(config, lambda i: i >= first)


def _fields(config: HFConfig) -> dict[str, Any]:
    return {"attention_bias": True, **upper_layers_slide(config)}


QWEN2 = Family("qwen2", _fields)
