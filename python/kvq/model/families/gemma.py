"""Gemma and Gemma 2: norms of 1 + w, scaled embeddings; the second with windows and soft-capping."""

from __future__ import annotations

from typing import Any

from .base import Family, HFConfig, sliding_layers

#: What the files of every Gemma leave out.
GEMMA_DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256}


def gemma_fields(config: HFConfig) -> dict[str, Any]:
    """The fields that all Gemmas share."""
    bias = bool(config.get("attention_bias", False))
    return {
        "attention_bias": bias,
        "attention_output_bias": bias,
        # files of the first Gemma say "gelu" in hidden_act and mean the approximation by tanh
        "hidden_act": config.get("hidden_activation", "gelu_pytorch_tanh"),
        "embedding_scale": float(config.need("hidden_size")) ** 0.5,
    }


def soft_capped_fields(config: HFConfig) -> dict[str, Any]:
    """The fields that Gemma 2 and 3 share."""
    return {
        **gemma_fields(config),
        "norm_placement": "both",
        "query_pre_attn_scalar": config.get("query_pre_attn_scalar", 256),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }


def _gemma2_fields(config: HFConfig) -> dict[str, Any]:
    return {**soft_capped_fields(config), **sliding_layers(config, lambda i: i % 2 == 0)}


GEMMA = Family("gemma", gemma_fields, GEMMA_DEFAULTS, norm_offset=1.0, activations="bfloat16")
GEMMA2 = Family(
    "gemma2",
    _gemma2_fields,
    {
        **GEMMA_DEFAULTS,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    norm_offset=1.0,
    activations="bfloat16",
)
