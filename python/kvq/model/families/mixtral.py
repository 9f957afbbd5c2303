"""Mixtral: Mistral's attention, experts in every layer."""

from __future__ import annotations

from typing import Any

from .base import Family, HFConfig, TensorNames, sliding_layers


def _fields(config: HFConfig) -> dict[str, Any]:
    return {
        **sliding_layers(config, lambda i: True),
        "num_experts": config.need("num_local_experts"),
        "num_experts_per_tok": config.need("num_experts_per_tok"),
        "moe_intermediate_size": config.need("intermediate_size"),
    }


MIXTRAL = Family(
    "mixtral",
    _fields,
    defaults={"rope_theta": 1e6},
    names=TensorNames(
        router="block_sparse_moe.gate",
        expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    ),
)
