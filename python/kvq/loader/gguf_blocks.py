"""The blocks of GGUF taken apart: codes, scales and minimums as :mod:`kvq.quantization.storage` keeps them.

Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 are taken over exactly. K-quants have scales of two levels, a product of which
is no float16: their codes are taken over exactly, and each product is rounded to float16 once, by at most
2**-11 of it. That is what rounding the weights to float16 would do, at a third of the bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvq.quantization.storage import PackedRows

#: Storage of each type of tensor; the others are dequantized to float16.
STORAGE_OF = {
    "F32": "float32",
    "F16": "float16",
    "Q4_0": "int4",
    "Q4_1": "int4_min",
    "Q5_0": "int8",
    "Q5_1": "int8_min",
    "Q8_0": "int8",
    "Q2_K": "int4_g16_min",
    "Q3_K": "int4_g16",
    "Q4_K": "int4_min",
    "Q5_K": "int8_min",
    "Q6_K": "int8_g16",
}
_INT8_CENTER, _INT4_CENTER = 128, 7


def packed_rows(raw: np.ndarray, kind: str, block_bytes: int) -> PackedRows:
    """Codes and scales of whole rows of blocks.

    Parameters
    ----------
    raw : numpy.ndarray
        ``uint8[n, bytes]``: rows as the file has them.
    kind : str
        A key of :data:`STORAGE_OF` that is no float.
    block_bytes : int
        Bytes of a block of this type.
    """
    n = raw.shape[0]
    codes, scale, offset = _READERS[kind](raw.reshape(-1, block_bytes))
    return PackedRows(
        STORAGE_OF[kind],
        codes.astype(np.uint8).reshape(n, -1),
        _to_float16(scale).reshape(n, -1),
        None if offset is None else _to_float16(offset).reshape(n, -1),
    )


def _to_float16(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


#: Blocks ``uint8[m, bytes]`` to codes ``[m, ...]``, scales and minimums.
_Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def _halves(blocks: np.ndarray, start: int, count: int = 1) -> np.ndarray:
    """``count`` float16 numbers of each block from byte ``start``."""
    return np.ascontiguousarray(blocks[:, start : start + 2 * count]).view("<f2")


def _nibbles(octets: np.ndarray, width: int) -> np.ndarray:
    """Low halves of each run of ``width`` bytes, then its high halves: ``[m, 2 * bytes]``."""
    runs = octets.reshape(len(octets), -1, 1, width)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(octets), -1)


def _bits(octets: np.ndarray) -> np.ndarray:
    """Bits of little-endian words, ``[m, 8 * bytes]``."""
    return np.unpackbits(octets, axis=1, bitorder="little")


def _q4_0(blocks: np.ndarray) -> _Parts:
    # (q - 8) * d = (15 - q - 7) * -d: the center of int4 is 7.
    return 15 - _nibbles(blocks[:, 2:], 16), -_halves(blocks, 0), None


def _q4_1(blocks: np.ndarray) -> _Parts:
    return _nibbles(blocks[:, 4:], 16), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: np.ndarray) -> _Parts:
    codes = _nibbles(blocks[:, 6:], 16) | (_bits(blocks[:, 2:6]) << 4)
    return codes + (_INT8_CENTER - 16), _halves(blocks, 0), None


def _q5_1(blocks: np.ndarray) -> _Parts:
    codes = _nibbles(blocks[:, 8:], 16) | (_bits(blocks[:, 4:8]) << 4)
    return codes + _INT8_CENTER, _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: np.ndarray) -> _Parts:
    return blocks[:, 2:] ^ 0x80, _halves(blocks, 0), None


def _pairs(octets: np.ndarray) -> np.ndarray:
    """The 2-bit fields of 64 bytes in the order of the weights: 32 bytes at a time, field by field."""
    runs = octets.reshape(-1, 2, 1, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)
    return ((runs >> shifts) & 3).reshape(-1, 256)


def _q2_k(blocks: np.ndarray) -> _Parts:
    levels, d = blocks[:, :16], _halves(blocks, 80, 2).astype(np.float32)
    return _pairs(blocks[:, 16:80]), d[:, :1] * (levels & 15), -d[:, 1:] * (levels >> 4)


def _q3_k(blocks: np.ndarray) -> _Parts:
    mask, packed = blocks[:, :32], blocks[:, 96:108]
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = ((mask[:, None, :] >> shifts) & 1).reshape(-1, 256)
    codes = _pairs(blocks[:, 32:96]) + high * 4 + (_INT4_CENTER - 4)
    low = _nibbles(packed[:, :8], 8)
    top = ((packed[:, None, 8:] >> np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 4, 1)) & 3).reshape(-1, 16)
    levels = (low | (top << 4)).astype(np.int16) - 32
    return codes, _halves(blocks, 108).astype(np.float32) * levels, None


def _levels_of_8(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The eight scales and eight minimums of 6 bits in 12 bytes."""
    first, second, mixed = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (mixed & 15) | ((first >> 6) << 4)], axis=1)
    minimums = np.concatenate([second & 63, (mixed >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, minimums


def _q4_k(blocks: np.ndarray) -> _Parts:
    d = _halves(blocks, 0, 2).astype(np.float32)
    scales, minimums = _levels_of_8(blocks[:, 4:16])
    return _nibbles(blocks[:, 16:], 32), d[:, :1] * scales, -d[:, 1:] * minimums


def _q5_k(blocks: np.ndarray) -> _Parts:
    d = _halves(blocks, 0, 2).astype(np.float32)
    scales, minimums = _levels_of_8(blocks[:, 4:16])
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = ((blocks[:, None, 16:48] >> shifts) & 1).reshape(-1, 256)
    codes = (_nibbles(blocks[:, 48:], 32) | (high << 4)) + _INT8_CENTER
    return codes, d[:, :1] * scales, -d[:, 1:] * minimums


def _q6_k(blocks: np.ndarray) -> _Parts:
    # two halves of 128 weights, each of 64 bytes of low and 32 bytes of high bits
    low = np.concatenate([_nibbles(blocks[:, i * 64 : i * 64 + 64], 64) for i in range(2)], axis=1)
    codes = (low | (_pairs(blocks[:, 128:192]) << 4)) + (_INT8_CENTER - 32)
    levels = blocks[:, 192:208].view(np.int8)
    return codes, _halves(blocks, 208).astype(np.float32) * levels, None


_READERS: dict[str, Callable[[np.ndarray], _Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
