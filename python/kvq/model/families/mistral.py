"""Mistral and Ministral: Llama, every layer with a sliding window in the first version."""

from __future__ import annotations

from typing import Any

from .base import Family, HFConfig, sliding_layers


def _fields(config: HFConfig) -> dict[str, Any]:
    return sliding_layers(config, lambda i: True)


MISTRAL = Family("mistral", _fields)
