"""Architectures of well-known models, for planning without a download.

Numbers are those of the ``config.json`` files their makers published.
"""

from __future__ import annotations

from collections.abc import Callable
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
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "head_dim": 128,
    "qk_norm": "head",
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}
_LLAMA3 = {"rope_theta": 500000.0}
_SMOLLM2 = {"rope_theta": 100000.0, "tie_word_embeddings": True}


def _gemma(layers: int, slides: Callable[[int], bool], hidden: int, **more: Any) -> dict[str, Any]:
    """Fields of Gemma 2 and 3 with ``layers`` layers, of which those that ``slides`` picks have a window."""
    return {
        "head_dim": 256,
        "query_pre_attn_scalar": 256.0,
        "norm_placement": "both",
        "embedding_scale": hidden**0.5,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "layer_types": tuple("sliding_attention" if slides(i) else "full_attention" for i in range(layers)),
        **more,
    }


def _gemma2(layers: int, hidden: int) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return _gemma(layers, lambda i: i % 2 == 0, hidden, model_type="gemma2", sliding_window=4096, **caps)


def _gemma3(layers: int, hidden: int, window: int) -> dict[str, Any]:
    rope = {"rope_theta": 1e6, "rope_local_theta": 1e4}
    kind = {"model_type": "gemma3_text", "qk_norm": "head", "sliding_window": window}
    return _gemma(layers, lambda i: (i + 1) % 6 != 0, hidden, **kind, **rope)


def _experts(count: int, used: int, width: int) -> dict[str, Any]:
    return {"num_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": width}


_QWEN3_MOE = {**_QWEN3, "model_type": "qwen3_moe", **_experts(128, 8, 768)}
_MIXTRAL = {"model_type": "mixtral", "rope_theta": 1e6, **_experts(8, 2, 14336)}
_OLMO2: dict[str, Any] = {
    "model_type": "olmo2",
    "norm_placement": "post",
    "qk_norm": "projection",
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-6,
}
_SMOLLM3: dict[str, Any] = {
    "model_type": "smollm3",
    "rope_layers": tuple((i + 1) % 4 != 0 for i in range(36)),
    "rope_theta": 5e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}

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
    "smollm3-3b": _llama(2048, 11008, 36, 16, 4, 128256, 65536, **_SMOLLM3),
    "qwen3-0.6b": _llama(1024, 3072, 28, 16, 8, 151936, 40960, **_QWEN3, tie_word_embeddings=True),
    "qwen3-8b": _llama(4096, 12288, 36, 32, 8, 151936, 40960, **_QWEN3),
    "qwen3-30b-a3b": _llama(2048, 6144, 48, 32, 4, 151936, 40960, **_QWEN3_MOE),
    "mixtral-8x7b": _llama(4096, 14336, 32, 32, 8, 32000, 32768, **_MIXTRAL),
    "gemma-2-2b": _llama(2304, 9216, 26, 8, 4, 256000, 8192, **_gemma2(26, 2304)),
    "gemma-2-9b": _llama(3584, 14336, 42, 16, 8, 256000, 8192, **_gemma2(42, 3584)),
    "gemma-3-270m": _llama(640, 2048, 18, 4, 1, 262144, 32768, **_gemma3(18, 640, 512)),
    "gemma-3-1b": _llama(1152, 6912, 26, 4, 1, 262144, 32768, **_gemma3(26, 1152, 512)),
    "phi-3-mini-4k": _llama(3072, 8192, 32, 32, 32, 32064, 4096, model_type="phi3", sliding_window=2047),
    "olmo-2-7b": _llama(4096, 11008, 32, 32, 32, 100352, 4096, **_OLMO2),
}
