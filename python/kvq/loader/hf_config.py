"""Normalizes a Hugging Face ``config.json`` into a :class:`~kvq.config.ModelConfig`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvq.config import ROPE_TYPES, ModelConfig, parse_config
from kvq.errors import ConfigError

#: ``model_type`` of config.json -> the family whose weights and code it shares.
FAMILIES = {"llama": "llama", "mistral": "llama"}


def model_config_from_hf(data: dict[str, Any], path: Path) -> ModelConfig:
    """Read the architecture out of ``config.json``.

    Parameters
    ----------
    data : dict
        Content of the file.
    path : Path
        The file, for messages.

    Raises
    ------
    ConfigError
        If the architecture is unknown, a key is missing, or a value is contradictory or not supported.
    """
    family = _family(data, path)
    heads = _need(data, "num_attention_heads", path)
    hidden = _need(data, "hidden_size", path)
    head_dim = data.get("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise ConfigError(
                f"{path}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
                "and there is no head_dim"
            )
        head_dim = hidden // heads
    theta, scaling = _rope(data, path)
    rotary = data.get("partial_rotary_factor")
    if data.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"{path}: hidden_act {data['hidden_act']!r} is not supported: use silu")
    bias = bool(data.get("attention_bias", False))
    fields = {
        "model_type": family,
        "head_dim": head_dim,
        "num_key_value_heads": data.get("num_key_value_heads") or heads,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rotary_dim": int(head_dim * rotary) if rotary not in (None, 1, 1.0) else None,
        "tie_word_embeddings": bool(data.get("tie_word_embeddings", False)),
        "attention_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bool(data.get("mlp_bias", False)),
        "max_position_embeddings": data.get("max_position_embeddings", 2048),
    }
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
    ):
        fields[key] = _need(data, key, path)
    config: ModelConfig = parse_config(ModelConfig, fields, path)
    return config


def _need(data: dict[str, Any], key: str, path: Path) -> Any:
    if data.get(key) is None:
        raise ConfigError(f"{path}: {key} is missing")
    return data[key]


def _family(data: dict[str, Any], path: Path) -> str:
    model_type = data.get("model_type")
    if model_type not in FAMILIES:
        named = model_type or ", ".join(data.get("architectures") or []) or "none named"
        raise ConfigError(f"{path}: unknown architecture {named!r}: known are {', '.join(FAMILIES)}")
    if data.get("quantization_config"):
        method = data["quantization_config"].get("quant_method", "some method")
        raise ConfigError(
            f"{path}: the checkpoint is already quantized ({method}): "
            "use the original in float16, bfloat16 or float32, or a GGUF file"
        )
    if data.get("sliding_window") is not None and data.get("use_sliding_window", True):
        window, limit = data["sliding_window"], data.get("max_position_embeddings", 0)
        if window < limit:
            raise ConfigError(f"{path}: sliding_window {window} is not supported for {model_type}")
    return FAMILIES[model_type]


def _rope(data: dict[str, Any], path: Path) -> tuple[float, dict[str, Any] | None]:
    """RoPE base and scaling, from ``rope_scaling`` + ``rope_theta`` or the newer ``rope_parameters``."""
    merged = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    theta = float(merged.pop("rope_theta", None) or data.get("rope_theta") or 10000.0)
    return theta, normalize_rope_scaling(merged, path)


def normalize_rope_scaling(scaling: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """Spell the kind of scaling under ``rope_type``; None where there is none.

    Raises
    ------
    ConfigError
        If the kind is unknown, or the numbers that it needs are missing.
    """
    scaling = dict(scaling)
    old, new = scaling.pop("type", None), scaling.pop("rope_type", None)
    kind = new or old
    if not scaling and kind is None:
        return None
    if kind == "su":  # the name under which longrope was first published
        kind = "longrope"
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"{path}: rope_scaling of kind {kind!r} is not supported: known are {', '.join(ROPE_TYPES)}"
        )
    if kind == "default":
        return None
    needed = {
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "longrope": ("short_factor", "long_factor"),
    }.get(kind, ("factor",))
    for key in needed:
        if scaling.get(key) is None:
            raise ConfigError(f"{path}: rope_scaling of kind {kind!r} lacks {key!r}")
    return {"rope_type": kind, **scaling}
