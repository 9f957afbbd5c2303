"""Storage of weights: MLC's ``q4f16_1``, and which tensors a scheme makes of a model.

``q4f16_1`` keeps, for 32 consecutive input channels, one fp16 scale and 4-bit codes 0 .. 14; a weight
is ``(code - 7) * scale``. Eight codes share a 32-bit word, the first in its lowest bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvq.config import ModelConfig
from kvq.errors import ConfigError
from kvq.model.parameters import llama_parameters
from kvq.quantization.scheme import WeightScheme

GROUP = 32
#: Codes are centred here: code 7 is zero, 0 and 14 are the ends.
ZERO_CODE = 7
#: Fractions of max|w| / 7 that are tried as scale; the one with the least squared error is kept.
_SCALE_FRACTIONS = (1.0, 0.95, 0.9, 0.85)
#: Smallest positive fp16: the floor that keeps a scale non-zero.
_SCALE_FLOOR = np.float32(2.0**-24)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a weights directory: what ``convert_weight`` writes and the library takes."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def stored_names(parameter: str, quantized: bool) -> tuple[str, ...]:
    """Names under which a parameter is stored: itself, or its codes and scales."""
    if not quantized:
        return (parameter,)
    stem = parameter.removesuffix(".weight")
    return (f"{stem}.q_weight", f"{stem}.q_scale")


def stored_parameters(config: ModelConfig, scheme: WeightScheme) -> list[StoredTensor]:
    """The tensors of a weights directory, in the order of :func:`~kvq.model.parameters.llama_parameters`.

    Raises
    ------
    ConfigError
        If a matrix has a row that is no whole number of groups.
    """
    out = []
    for parameter in llama_parameters(config):
        quantized = scheme.bits is not None and parameter.quantize
        names = stored_names(parameter.name, quantized)
        if not quantized:
            out.append(StoredTensor(names[0], parameter.shape, scheme.dtype))
            continue
        n, k = parameter.shape
        _check_groups(parameter.name, k)
        out.append(StoredTensor(names[0], (n, k // 8), "uint32"))
        out.append(StoredTensor(names[1], (n, k // GROUP), "float16"))
    return out


def _check_groups(name: str, k: int) -> None:
    if k % GROUP:
        raise ConfigError(
            f"{name}: {k} input channels are no multiple of {GROUP}, which q4f16_1 needs: use q0f16 or q0f32"
        )


def quantize_q4f16_1(weight: np.ndarray, name: str = "weight") -> tuple[np.ndarray, np.ndarray]:
    """Quantize a matrix to 4-bit codes with one scale for 32 input channels.

    Parameters
    ----------
    weight : numpy.ndarray
        ``[N, K]``, any float dtype, finite.
    name : str
        For the message of an error.

    Returns
    -------
    q_weight : numpy.ndarray
        ``uint32[N, K / 8]``.
    q_scale : numpy.ndarray
        ``float16[N, K / 32]``, finite and positive; 1 for a group of zeros.

    Raises
    ------
    ConfigError
        If K is no multiple of 32, or a group is too large for an fp16 scale.
    """
    n, k = weight.shape
    _check_groups(name, k)
    groups = weight.astype(np.float32).reshape(n, k // GROUP, GROUP)
    peak = np.abs(groups).max(axis=2)
    if not np.all(peak < ZERO_CODE * 65504.0):  # also false for NaN
        raise ConfigError(f"{name}: holds NaN, infinity or a value beyond the fp16 range: use q0f32")
    best_scale = np.ones_like(peak)
    best_codes = np.zeros_like(groups)
    best_error = np.full(peak.shape, np.inf, np.float32)
    for fraction in _SCALE_FRACTIONS:
        scale = np.maximum(peak * np.float32(fraction / ZERO_CODE), _SCALE_FLOOR)
        scale = np.minimum(scale, 65504.0).astype(np.float16).astype(np.float32)
        scale[peak == 0] = 1.0
        codes = groups / scale[..., None]
        np.rint(codes, out=codes)
        np.clip(codes, -ZERO_CODE, ZERO_CODE, out=codes)
        # In units of the weights: a smaller scale has smaller errors inside and larger ones at the ends.
        difference = codes * scale[..., None]
        difference -= groups
        error = np.einsum("ngk,ngk->ng", difference, difference)
        better = error < best_error
        best_error[better] = error[better]
        best_scale[better] = scale[better]
        best_codes[better] = codes[better]
    return _pack(best_codes), best_scale.astype(np.float16)


def _pack(centred: np.ndarray) -> np.ndarray:
    """Pack codes in -7 .. 7, ``[N, G, 32]``, into ``uint32[N, 4 G]``."""
    n, num_groups, _ = centred.shape
    nibbles = (centred + ZERO_CODE).astype(np.uint8).reshape(n, -1, 2)
    pairs = nibbles[..., 0] | (nibbles[..., 1] << 4)
    return np.ascontiguousarray(pairs).view("<u4").reshape(n, num_groups * 4)


def dequantize_q4f16_1(q_weight: np.ndarray, q_scale: np.ndarray) -> np.ndarray:
    """The matrix that codes and scales stand for.

    Parameters
    ----------
    q_weight, q_scale : numpy.ndarray
        As :func:`quantize_q4f16_1` returns them.

    Returns
    -------
    numpy.ndarray
        ``float32[N, K]``.
    """
    n = q_weight.shape[0]
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    codes = ((q_weight[..., None] >> shifts) & 15).astype(np.float32).reshape(n, -1, GROUP)
    return ((codes - ZERO_CODE) * q_scale.astype(np.float32)[..., None]).reshape(n, -1)
