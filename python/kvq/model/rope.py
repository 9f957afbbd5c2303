"""RoPE frequencies of every supported scaling, computed once when a model is compiled."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvq.errors import CompileError


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
    elif kind != "default":
        raise CompileError(f"rope_scaling {kind!r} cannot be compiled: use default, linear, llama3 or yarn")
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

    low, high = dimension(float(scaling.get("beta_fast", 32))), dimension(float(scaling.get("beta_slow", 1)))
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
