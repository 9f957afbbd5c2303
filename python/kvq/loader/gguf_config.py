"""The configuration in a GGUF file's metadata: they are spelled as ``config.json`` and read as one."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvq.config import ModelConfig
from kvq.errors import CheckpointError, ConfigError
from kvq.loader.gguf_file import GGUFFile
from kvq.loader.gguf_names import ARCHITECTURES, MIXTRAL, Architecture
from kvq.loader.hf_config import model_config_from_hf

#: RoPE frequency factors of llama3 scaling; they become ``rope_scaling`` and are no weight.
ROPE_FREQS = "rope_freqs.weight"
#: Frequency factors of longrope, the same.
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"

#: Keys of config.json by those of the metadata, below the architecture's name.
_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "rope.freq_base": "rope_theta",
    "context_length": "max_position_embeddings",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_used_count": "num_experts_per_tok",
}
_REQUIRED = ("attention.head_count", "embedding_length", "feed_forward_length", "block_count")
#: Layers of the two models whose scores are scaled by hidden_size / heads instead of the head_dim.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}


def architecture_of(file: GGUFFile) -> Architecture:
    """The architecture of a file.

    Raises
    ------
    ConfigError
        If it is not known.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(f"{file.path}: unknown architecture {name!r}: known are {', '.join(ARCHITECTURES)}")
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return MIXTRAL
    return ARCHITECTURES[name]


def read_config(file: GGUFFile, architecture: Architecture, names: set[str]) -> ModelConfig:
    """The configuration of a file.

    Parameters
    ----------
    file : GGUFFile
        The open file.
    architecture : Architecture
        What it is.
    names : set of str
        Its tensors, by Hugging Face's names.

    Raises
    ------
    ConfigError, CheckpointError
        If something is missing, contradictory or not supported.
    """
    reader = _Reader(file, architecture, names)
    try:
        return reader.config()
    except (TypeError, ValueError, ZeroDivisionError, IndexError, AttributeError) as problem:
        raise CheckpointError(f"{file.path}: a value of the metadata makes no sense: {problem}") from None


class _Reader:
    """Translates the metadata key by key."""

    def __init__(self, file: GGUFFile, architecture: Architecture, names: set[str]) -> None:
        self.file, self.architecture, self.names = file, architecture, names
        self.prefix = file.metadata["general.architecture"]

    def key(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.prefix}.{key}", default)

    def refuse(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.file.path}: {problem}")

    def config(self) -> ModelConfig:
        path, meta = self.file.path, self.file.metadata
        if meta.get("split.count", 1) > 1:
            raise self.refuse(
                f"one of {meta['split.count']} parts of a model: merge them with llama-gguf-split --merge"
            )
        if "token_embd.weight" not in self.file.names():
            raise CheckpointError(f"{path}: tensor token_embd.weight is missing")
        for key in _REQUIRED:
            if not self.key(key):
                raise self.refuse(f"{self.prefix}.{key} is missing")
        for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
            if isinstance(self.key(key), list):
                raise self.refuse(f"values of {self.prefix}.{key} that differ by layer are not supported")
        model = model_config_from_hf(self.spelled(), path)
        biases = {
            "attention_bias": ("q_proj", "qkv_proj"),
            "attention_output_bias": ("o_proj",),
        }
        # Which tensors there are says more than the metadata, which say nothing.
        found = {
            key: any(f"model.layers.0.self_attn.{part}.bias" in self.names for part in parts)
            for key, parts in biases.items()
        }
        return model.model_copy(
            update={**found, "mlp_bias": "model.layers.0.mlp.down_proj.bias" in self.names}
        )

    def spelled(self) -> dict[str, Any]:
        """The metadata as ``config.json``."""
        heads, hidden = self.key("attention.head_count"), self.key("embedding_length")
        head_dim = self.key("attention.key_length") or hidden // heads
        data: dict[str, Any] = {
            "model_type": self.architecture.family,
            "vocab_size": self.file.shape("token_embd.weight")[0],
            "head_dim": head_dim,
            "partial_rotary_factor": self.key("rope.dimension_count", head_dim) / head_dim,
            "rope_scaling": self.rope_scaling(head_dim),
            "tie_word_embeddings": "lm_head.weight" not in self.names,
            "original_max_position_embeddings": self.key("rope.scaling.original_context_length"),
            **self.experts(),
        }
        for key, name in _KEYS.items():
            value = self.key(key)
            if value is not None and (value or key != "attention.sliding_window"):
                # Stored as float32: shorten 9.999999747378752e-06 to the number that was meant.
                data[name] = _shortest(value) if isinstance(value, float) else value
        data.setdefault("rms_norm_eps", 1e-5)
        if "gemma" in self.prefix:
            by_width = self.key("block_count") == _SCALED_BY_WIDTH.get(self.prefix)
            data["query_pre_attn_scalar"] = hidden / heads if by_width else head_dim
        if self.key("rope.freq_base_swa") is not None:
            data["rope_local_base_freq"] = _shortest(self.key("rope.freq_base_swa"))
        if self.key("attention.sliding_window_pattern") is not None:
            data["sliding_window_pattern"] = self.key("attention.sliding_window_pattern")
        return {key: value for key, value in data.items() if value is not None}

    def experts(self) -> dict[str, Any]:
        count = self.key("expert_count")
        if not count:
            return {}
        if self.key("expert_shared_count"):
            raise self.refuse("experts that all tokens share are not supported")
        layers = range(self.key("block_count"))
        dense = [i for i in layers if f"model.layers.{i}.mlp.down_proj.weight" in self.names]
        return {
            "num_experts": count,
            "num_local_experts": count,
            "moe_intermediate_size": self.key("expert_feed_forward_length"),
            "norm_topk_prob": True,
            "mlp_only_layers": dense,
        }

    def rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        names = self.file.names()
        if ROPE_FREQS in names:
            return self.llama3_scaling(head_dim)
        if ROPE_LONG in names and ROPE_SHORT in names:
            long, short = (self.file.read(name, slice(None)) for name in (ROPE_LONG, ROPE_SHORT))
            return {
                "rope_type": "longrope",
                "long_factor": [_shortest(value) for value in long],
                "short_factor": [_shortest(value) for value in short],
            }
        kind = self.key("rope.scaling.type", "none")
        factor = self.key("rope.scaling.factor", self.key("rope.scale_linear"))
        if kind in ("none", "linear") and factor in (None, 0, 1):
            return None
        if kind in ("none", "linear"):
            return {"rope_type": "linear", "factor": factor}
        original = self.key("rope.scaling.original_context_length")
        if kind == "yarn" and factor and original:
            return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        raise self.refuse(f"rope scaling of kind {kind!r} with factor {factor} is not supported")

    def llama3_scaling(self, head_dim: int) -> dict[str, Any]:
        """Recover the parameters of llama3 scaling from the factors by which it divides frequencies."""
        stored = self.file.read(ROPE_FREQS, slice(None)).astype(np.float64)
        scaling = {
            "rope_type": "llama3",
            "factor": _shortest(float(stored.max())),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        expected = llama3_factors(scaling, self.key("rope.freq_base", 10000.0), head_dim)
        if len(stored) == head_dim // 2 and np.allclose(stored, expected, rtol=1e-3):
            return scaling
        raise self.refuse(f"{ROPE_FREQS} holds factors that are not those of llama3 scaling")


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))


def llama3_factors(scaling: dict[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """Factors of llama3 scaling for the ``head_dim // 2`` frequencies (Llama 3.1 model card)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (scaling["original_max_position_embeddings"] / wavelength - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)
