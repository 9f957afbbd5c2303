"""Architectures of well-known models, for planning without a download.

Numbers are those of the ``config.json`` files their makers published.
"""

from __future__ import annotations

from typing import Any

from kvq.config import ModelConfig


def _llama(
    hidden: int, inter: int, layers: int, heads: int, kv_heads: int, vocab: int, context: int, **more: Any
) -> ModelConfig:
    return ModelConfig(
        **{
            "model_type": "llama",
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": inter,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": hidden // heads,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": context,
            **more,
        }
    )


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
    }


_QWEN2 = {"model_type": "qwen2", "attention_bias": True, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
_LLAMA3 = {"rope_theta": 500000.0}
_SMOLLM2 = {"rope_theta": 100000.0, "tie_word_embeddings": True}

PRESETS: dict[str, ModelConfig] = {
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-2-13b": _llama(5120, 13824, 40, 40, 40, 32000, 4096),
    "llama-2-70b": _llama(8192, 28672, 80, 64, 8, 32000, 4096),
    "llama-3-8b": _llama(4096, 14336, 32, 32, 8, 128256, 8192, **_LLAMA3),
    "llama-3-70b": _llama(8192, 28672, 80, 64, 8, 128256, 8192, **_LLAMA3),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256, 131072, **_llama3_rope(32.0)),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128256, 131072, **_llama3_rope(32.0)),
    "qwen2.5-0.5b": _llama(896, 4864, 24, 14, 2, 151936, 32768, **_QWEN2, tie_word_embeddings=True),
    "qwen2.5-7b": _llama(3584, 18944, 28, 28, 4, 152064, 32768, **_QWEN2),
    "mistral-7b": _llama(4096, 14336, 32, 32, 8, 32768, 32768, model_type="mistral", rope_theta=1e6),
    "smollm2-135m": _llama(576, 1536, 30, 9, 3, 49152, 8192, **_SMOLLM2),
    "smollm2-360m": _llama(960, 2560, 32, 15, 5, 49152, 8192, **_SMOLLM2),
    "smollm2-1.7b": _llama(2048, 8192, 24, 32, 32, 49152, 8192, **{**_SMOLLM2, "rope_theta": 130000.0}),
}
