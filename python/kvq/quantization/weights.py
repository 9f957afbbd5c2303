"""Storage of weights: MLC's ``q4f16_1``, and which tensors a scheme makes of a model.

``q4f16_1`` keeps, for 32 consecutive input channels, one fp16 scale and 4-bit codes; a weight is
``(code - 7) * scale``. Eight codes share a 32-bit word, the first in its lowest bits.

MLC-LLM's own converter uses the codes 0 .. 14 and a positive scale. Here the scale has the sign that puts
the largest value of the group at code 15, and is then fitted to the codes: all 16 codes are used, any
reader of the format decodes it, and the squared error is a quarter smaller. On prose, 4-bit weights cost
SmolLM2 0.29 nats a token instead of 0.36.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvq.config import ModelConfig
from kvq.errors import ConfigError
from kvq.model.parameters import model_parameters
from kvq.quantization.scheme import WeightScheme
from kvq.quantization.storage import GROUP, STORAGES, PackedRows, pack_codes, unpack_codes

#: Code of a zero weight; codes run from 0 to 15.
ZERO_CODE = STORAGES["int4"].center
#: Distance of the last code from the zero code: the largest value of a group stands there.
_TOP = 15 - ZERO_CODE
#: Smallest positive fp16: the floor that keeps a scale non-zero.
_SCALE_FLOOR = np.float32(2.0**-24)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a weights directory: what ``convert_weight`` writes and the library takes."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def stored_tensors(name: str, shape: tuple[int, ...], storage: str) -> list[StoredTensor]:
    """The tensors that a parameter is stored as: itself, or its codes, scales and offsets.

    Raises
    ------
    ConfigError
        If the rows of a quantized matrix are no whole number of groups.
    """
    kind = STORAGES[storage]
    if kind.bits is None:
        return [StoredTensor(name, shape, storage)]
    (n, k), stem = shape, name.removesuffix(".weight")
    _check_groups(name, k)
    out = [
        StoredTensor(f"{stem}.q_weight", (n, k * kind.bits // 32), "uint32"),
        StoredTensor(f"{stem}.q_scale", (n, k // kind.group), "float16"),
    ]
    if kind.offset is not None:
        out.append(StoredTensor(f"{stem}.q_{kind.offset}", (n, k // kind.group), "float16"))
    return out


def stored_parameters(config: ModelConfig, scheme: WeightScheme) -> list[StoredTensor]:
    """The tensors of a weights directory, in the order of :func:`~kvq.model.parameters.model_parameters`.

    Raises
    ------
    ConfigError
        If a matrix has a row that is no whole number of groups.
    """
    return [
        tensor
        for parameter in model_parameters(config)
        for tensor in stored_tensors(
            parameter.name, parameter.shape, scheme.storage(parameter.name, parameter.quantize)
        )
    ]


def _check_groups(name: str, k: int) -> None:
    if k % GROUP:
        raise ConfigError(
            f"{name}: {k} input channels are no multiple of {GROUP}, which weights in codes need: "
            "use q0f16 or q0f32"
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
        ``float16[N, K / 32]``, finite and not zero; 1 for a group of zeros.

    Raises
    ------
    ConfigError
        If K is no multiple of 32, or a group is too large for an fp16 scale.
    """
    n, k = weight.shape
    _check_groups(name, k)
    groups = weight.astype(np.float32).reshape(n, k // GROUP, GROUP)
    # The value of largest magnitude, with its sign.
    low, high = groups.min(axis=2), groups.max(axis=2)
    peak = np.where(-low > high, low, high)
    if not np.all(np.abs(peak) < _TOP * 65504.0):  # also false for NaN
        raise ConfigError(f"{name}: holds NaN, infinity or a value beyond the fp16 range: use q0f32")
    scale = np.copysign(np.maximum(np.abs(peak) / _TOP, _SCALE_FLOOR), peak)
    scale[peak == 0] = 1.0
    codes = _nearest_codes(groups, _to_fp16(scale))
    # The scale with the least squared error for these codes; then the best codes for that scale.
    energy = np.einsum("ngk,ngk->ng", codes, codes)
    fitted = np.einsum("ngk,ngk->ng", codes, groups) / np.maximum(energy, 1)
    usable = (energy > 0) & (np.abs(fitted) >= 2 * _SCALE_FLOOR)
    scale = _to_fp16(np.where(usable, fitted, scale))
    codes = _nearest_codes(groups, scale)
    codes += ZERO_CODE
    return pack_codes(codes.astype(np.uint8).reshape(n, k), 4), scale.astype(np.float16)


def _to_fp16(scale: np.ndarray) -> np.ndarray:
    """Round to fp16, as float32; a scale just above the range becomes its end."""
    return np.clip(scale, -65504.0, 65504.0).astype(np.float16).astype(np.float32)


def _nearest_codes(groups: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The nearest codes, -7 .. 8, as float32."""
    codes = groups / scale[..., None]
    np.rint(codes, out=codes)
    return np.clip(codes, -ZERO_CODE, _TOP, out=codes)


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
    return PackedRows("int4", unpack_codes(q_weight, 4), q_scale).dequantized()
