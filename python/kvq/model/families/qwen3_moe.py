"""Qwen3-MoE: Qwen3's attention, experts in most layers."""

from __future__ import annotations

from typing import Any

from .base import Family, HFConfig
from .qwen3 import qwen3_attention


def _fields(config: HFConfig) -> dict[str, Any]:
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    return {
        **qwen3_attention(config),
        "num_experts": config.need("num_experts"),
        "num_experts_per_tok": config.need("num_experts_per_tok"),
        "moe_intermediate_size": config.need("moe_intermediate_size"),
        "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
        "moe_layers": config.per_layer(lambda i: i not in dense and (i + 1) % step == 0),
    }


QWEN3_MOE = Family("qwen3_moe", _fields)
