"""Normalizes a Hugging Face ``config.json`` into a :class:`~kvq.config.ModelConfig`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvq.config import ROPE_TYPES, ModelConfig, parse_config
from kvq.errors import ConfigError
from kvq.model.families import FAMILIES, Family, HFConfig

#: Keys that every family must have, under the same name in :class:`ModelConfig`.
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
#: Kinds of RoPE scaling that count from the context a model was trained for at first.
_FROM_ORIGINAL = ("dynamic", "yarn", "longrope")


def model_config_from_hf(data: dict[str, Any], path: Path) -> ModelConfig:
    """Read the architecture out of ``config.json``.

    What all families have in common is read here, the rest in the family's own file.

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
    config = HFConfig({**family.defaults, **data}, path)
    heads, hidden = config.need("num_attention_heads"), config.need("hidden_size")
    head_dim = config.get("head_dim")
    if head_dim is None:
        if hidden % heads:
            config.refuse(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
                "and there is no head_dim"
            )
        head_dim = hidden // heads
    act = config.get("hidden_act", "silu")
    fields = {
        "model_type": family.model_type,
        "head_dim": head_dim,
        "num_key_value_heads": config.get("num_key_value_heads", heads),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "max_position_embeddings": config.get("max_position_embeddings", 2048),
        "hidden_act": "silu" if act == "swish" else act,
        **{key: config.need(key) for key in _REQUIRED},
        **_rope(config, head_dim),
        **family.fields(config),
    }
    if "rms_norm_eps" not in fields:
        fields["rms_norm_eps"] = config.need("rms_norm_eps")
    _drop_idle_window(fields)
    model: ModelConfig = parse_config(ModelConfig, fields, path)
    return model


def _family(data: dict[str, Any], path: Path) -> Family:
    model_type = data.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        named = model_type or ", ".join(data.get("architectures") or []) or "none named"
        raise ConfigError(f"{path}: unknown architecture {named!r}: known are {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def _drop_idle_window(fields: dict[str, Any]) -> None:
    """Forget a window that no sequence is longer than."""
    window, scaling = fields.get("sliding_window"), fields["rope_scaling"] or {}
    longest = fields["max_position_embeddings"]
    original = scaling.get("original_max_position_embeddings") or longest
    longest = max(longest, int(original * float(scaling.get("factor") or 1)))
    if isinstance(window, int) and window >= longest and fields.get("rope_local_theta") is None:
        del fields["sliding_window"], fields["layer_types"]


def _rope(config: HFConfig, head_dim: int) -> dict[str, Any]:
    """Base, scaling and rotated part, from ``rope_scaling`` or the newer ``rope_parameters``."""
    newer = config.get("rope_parameters", {})
    if isinstance(newer.get("full_attention"), dict):  # a RoPE for each type of layer
        newer = newer["full_attention"]
    merged = {**config.get("rope_scaling", {}), **newer}
    theta = merged.pop("rope_theta", None) or config.get("rope_theta", 10000.0)
    part = merged.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor", 1.0)
    trained = config.get("max_position_embeddings", 2048)
    scaling = normalize_rope_scaling(merged, config.path)
    if scaling is not None and scaling["rope_type"] in _FROM_ORIGINAL:
        original = config.get("original_max_position_embeddings")
        if original is not None:
            scaling["original_max_position_embeddings"] = original
        original = scaling.setdefault("original_max_position_embeddings", trained)
        scaling.setdefault("factor", trained / original)
    rotary_dim = int(head_dim * part)
    for key in ("short_factor", "long_factor"):
        factors = (scaling or {}).get(key)
        if factors is not None and (not isinstance(factors, list) or len(factors) != rotary_dim // 2):
            config.refuse(
                f"rope_scaling {key!r} must be a list of {rotary_dim // 2} numbers, one for each rotated pair"
            )
    return {
        "rope_theta": float(theta),
        "rope_scaling": scaling,
        "rotary_dim": rotary_dim if part != 1 else None,
    }


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
