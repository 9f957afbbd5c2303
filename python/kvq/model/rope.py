"""RoPE frequencies of every supported scaling, computed once when a model is compiled.

Two scalings, ``dynamic`` and ``longrope``, depend on how long the sequence is. A key stands in the cache with
the rotation it was given, so these are fixed for the context that a model is compiled for (:func:`fix_rope`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvq.config import ModelConfig
from kvq.errors import CompileError

#: Kinds of scaling that :func:`fix_rope` must have fixed.
BY_LENGTH = ("dynamic", "longrope")


def fix_rope(config: ModelConfig, context_window_size: int) -> ModelConfig:
    """The model with a RoPE that does not depend on how long a sequence is.

    Parameters
    ----------
    config : ModelConfig
        The model.
    context_window_size : int
        Tokens of the longest sequence, to which every length is taken to come.

    Returns
    -------
    ModelConfig
        ``dynamic`` has become another ``rope_theta``; ``longrope`` has one list of factors, ``ext_factor``,
        and its ``attention_factor``. Other models come back as they are.
    """
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type")
    if kind not in BY_LENGTH or "ext_factor" in scaling:
        return config
    factor, original = float(scaling["factor"]), int(scaling["original_max_position_embeddings"])
    if kind == "dynamic":
        dim, length = config.rotary_dim or config.head_dim, max(context_window_size, original)
        stretch = factor * length / original - (factor - 1)
        theta = config.rope_theta * stretch ** (dim / (dim - 2))
        return config.model_copy(update={"rope_theta": theta, "rope_scaling": None})
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    chosen = scaling["long_factor" if context_window_size > original else "short_factor"]
    fixed = {"rope_type": kind, "ext_factor": chosen, "attention_factor": attention}
    return config.model_copy(update={"rope_scaling": fixed})


def describe_fixed_rope(config: ModelConfig, context_window_size: int) -> str | None:
    """A line for the user on what :func:`fix_rope` does to a model; None where it does nothing."""
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type")
    if kind not in BY_LENGTH:
        return None
    fixed = fix_rope(config, context_window_size)
    if kind == "dynamic":
        how = f"its base is {fixed.rope_theta:.6g}"
    else:
        long = context_window_size > int(scaling["original_max_position_embeddings"])
        how = f"it takes the {'long' if long else 'short'} factors"
    return (
        f"RoPE scaling {kind!r} is fixed for the context of {context_window_size} tokens, also in shorter "
        f"sequences: {how}"
    )


def rope_parameters(
    theta: float, rotary_dim: int, scaling: dict[str, Any] | None = None, position_scale: float = 1.0
) -> tuple[np.ndarray, float]:
    """Inverse frequencies and the attention factor of a RoPE.

    Parameters
    ----------
    theta : float
        Base of the frequencies.
    rotary_dim : int
        Dimensions of a head that rotate.
    scaling : dict, optional
        As in a Hugging Face configuration: ``rope_type`` and its numbers.
    position_scale : float
        Positions are multiplied by it (1 for almost every model).

    Returns
    -------
    inverse_frequency : np.ndarray
        float32 ``[rotary_dim / 2]``.
    attention_factor : float
        What the cosines and sines are multiplied by.

    Raises
    ------
    CompileError
        For a scaling that cannot be compiled.
    """
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    frequency = (np.float32(1) / np.power(np.float32(theta), exponent)).astype(np.float32)
    scaling = scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    factor = float(scaling.get("factor", 1.0))
    attention = 1.0
    if kind == "linear":
        frequency = frequency / np.float32(factor)
    elif kind == "llama3":
        frequency = _llama3(frequency, scaling, factor)
    elif kind == "yarn":
        frequency, attention = _yarn(frequency, scaling, factor, theta, rotary_dim)
    elif kind == "longrope" and "ext_factor" in scaling:
        frequency = frequency / np.asarray(scaling["ext_factor"], np.float32)
        attention = float(scaling["attention_factor"])
    elif kind in BY_LENGTH:
        raise CompileError(f"rope_scaling {kind!r} depends on the length of a sequence: fix it first")
    elif kind != "default":
        raise CompileError(f"rope_scaling {kind!r} cannot be compiled: it is not known")
    return (frequency * np.float32(position_scale)).astype(np.float32), attention


def _llama3(frequency: np.ndarray, scaling: dict[str, Any], factor: float) -> np.ndarray:
    """Long wavelengths are stretched by ``factor``, short ones kept, with a smooth passage between."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / frequency
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1).astype(np.float32)
    return ((1 - smooth) * frequency / np.float32(factor) + smooth * frequency).astype(np.float32)


def _yarn(
    frequency: np.ndarray, scaling: dict[str, Any], factor: float, theta: float, rotary_dim: int
) -> tuple[np.ndarray, float]:
    """YaRN (arXiv:2309.00071): interpolate slow dimensions, keep fast ones, scale the attention."""
    original = float(scaling["original_max_position_embeddings"])

    def dimension(rotations: float) -> float:
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (
        dimension(float(scaling.get(key) or default))
        for key, default in (("beta_fast", 32), ("beta_slow", 1))
    )
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = np.clip((np.arange(rotary_dim // 2) - low) / max(high - low, 0.001), 0, 1).astype(np.float32)
    attention = scaling.get("attention_factor")
    if attention is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = _yarn_scale(factor, mscale) / _yarn_scale(factor, all_dim) if mscale and all_dim else None
    attention = _yarn_scale(factor, 1.0) if attention is None else attention
    stretched = frequency / np.float32(factor)
    return (stretched * ramp + frequency * (1 - ramp)).astype(np.float32), float(attention)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
