"""StableLM 2 1.6B and StableLM 3B: LayerNorm with a bias, RoPE on a part of each head."""

from __future__ import annotations

from typing import Any

from .base import Family, HFConfig


def _fields(config: HFConfig) -> dict[str, Any]:
    for key in ("use_parallel_residual", "qk_layernorm"):
        if config.get(key, False):
            config.refuse(f"{key} is not supported: the larger StableLM 2 models have it")
    return {
        "attention_bias": bool(config.get("use_qkv_bias", False)),
        "norm_type": "layer_norm",
        "rms_norm_eps": config.get("layer_norm_eps", 1e-5),
    }


STABLELM = Family("stablelm", _fields, defaults={"partial_rotary_factor": 0.25})
