"""Gemma 3, text: Gemma 2 with norms of q and k and a second RoPE base instead of soft-capping."""

from __future__ import annotations

from typing import Any

from .base import Family, HFConfig, sliding_layers
from .gemma import GEMMA_DEFAULTS, soft_capped_fields


def _fields(config: HFConfig) -> dict[str, Any]:
    if config.get("use_bidirectional_attention"):
        config.refuse("use_bidirectional_attention is not supported: the model is an encoder")
    pattern = config.get("sliding_window_pattern", 6)
    local = (config.get("rope_parameters", {}).get("sliding_attention") or {}).get("rope_theta")
    return {
        **soft_capped_fields(config),
        **sliding_layers(config, lambda i: (i + 1) % pattern != 0),
        "qk_norm": "head",
        "rope_local_theta": local or config.get("rope_local_base_freq", 10000.0),
    }


GEMMA3_TEXT = Family(
    "gemma3_text",
    _fields,
    # the files of the larger ones name little beyond their sizes
    {
        **GEMMA_DEFAULTS,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "sliding_window": 4096,
    },
    norm_offset=1.0,
    activations="bfloat16",
)
