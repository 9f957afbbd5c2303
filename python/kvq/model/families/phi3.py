"""Phi-3, Phi-3.5 and Phi-4-mini: Llama, its projections fused in the checkpoint, often longrope."""

from __future__ import annotations

from typing import Any

from .base import Family, HFConfig, TensorNames, sliding_layers


def _fields(config: HFConfig) -> dict[str, Any]:
    return sliding_layers(config, lambda i: True)


PHI3 = Family("phi3", _fields, names=TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)))
