"""Numpy reference of the KV formats: what a sealed page holds, bit for bit.

The kernels must produce exactly these words. Arithmetic is float32 in the order written here; the
layout of the words is :class:`kvq.layout.KVLayout`'s.

Keys have a scale and a minimum per channel over the page. The scale is a minifloat, rounded up so
that the range of the page is never clipped, relative to a power of two kept per page and head.
Values, rotated by an orthonormal Hadamard transform when they were appended, have one signed fp16
scale a token: the element of largest magnitude sits on the most negative code.
"""

from __future__ import annotations

import numpy as np

from kvq.layout import (
    BASE_BITS,
    CODES_PER_CHUNK,
    K_LANES,
    SCALE_BIAS,
    SCALE_MIN_EXPONENT,
    KVLayout,
)
from kvq.quantization import fragments

#: A scale's float32 bits, shifted down to its 4 mantissa bits, minus those of its code, is
#: ``16 * (base + _EXPONENT_OFFSET)``.
EXPONENT_OFFSET = 127 - SCALE_BIAS


def hadamard(dim: int) -> np.ndarray:
    """Orthonormal block-diagonal Hadamard matrix, float32 ``[dim, dim]``.

    ``dim = b * 2**n`` with odd ``b`` gives ``b`` blocks of size ``2**n``. It is its own inverse.
    """
    block = dim & -dim
    h = np.ones((1, 1))
    while len(h) < block:
        h = np.block([[h, h], [h, -h]])
    return np.kron(np.eye(dim // block), h / np.sqrt(block)).astype(np.float32)


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack 32 codes into ``bits`` words.

    Codes of 2, 4 or 8 bits lie in order. Of 3-bit codes, words hold ten each in their low 30 bits;
    the last two codes lie across the top two bits of the three words.

    Parameters
    ----------
    codes : np.ndarray
        Integers below ``2**bits``, ``[..., 32]``.

    Returns
    -------
    np.ndarray
        uint32 ``[..., bits]``.
    """
    codes = codes.astype(np.uint32)
    words = np.zeros((*codes.shape[:-1], bits), np.uint32)
    if bits == 3:
        for i in range(30):
            words[..., i // 10] |= codes[..., i] << np.uint32(3 * (i % 10))
        for i in (30, 31):
            for w in range(3):
                words[..., w] |= ((codes[..., i] >> np.uint32(w)) & np.uint32(1)) << np.uint32(i)
        return words
    per_word = 32 // bits
    for i in range(CODES_PER_CHUNK):
        words[..., i // per_word] |= codes[..., i] << np.uint32(bits * (i % per_word))
    return words


def unpack_codes(words: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of :func:`pack_codes`: uint32 ``[..., bits]`` to uint32 ``[..., 32]``."""
    words = words.astype(np.uint32)
    codes = np.zeros((*words.shape[:-1], CODES_PER_CHUNK), np.uint32)
    mask = np.uint32(2**bits - 1)
    if bits == 3:
        for i in range(30):
            codes[..., i] = (words[..., i // 10] >> np.uint32(3 * (i % 10))) & mask
        for i in (30, 31):
            for w in range(3):
                codes[..., i] |= ((words[..., w] >> np.uint32(i)) & np.uint32(1)) << np.uint32(w)
        return codes
    per_word = 32 // bits
    for i in range(CODES_PER_CHUNK):
        codes[..., i] = (words[..., i // per_word] >> np.uint32(bits * (i % per_word))) & mask
    return codes


def sanitize(x: np.ndarray) -> np.ndarray:
    """What ``append`` stores of float32 rows: NaN becomes 0, magnitudes saturate at 65504; fp16."""
    return np.clip(np.nan_to_num(x, nan=0.0, posinf=65504.0, neginf=-65504.0), -65504.0, 65504.0).astype(
        np.float16
    )


def quantize_keys(k: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Quantize the keys of a page.

    Parameters
    ----------
    k : np.ndarray
        Rows of a full page, float16 ``[..., page, head_dim]``.

    Returns
    -------
    codes : np.ndarray
        uint32 ``[..., page, head_dim]``.
    scale_codes : np.ndarray
        uint8 ``[..., head_dim]``.
    minimum : np.ndarray
        float16 ``[..., head_dim]``.
    base : np.ndarray
        uint8 ``[...]``.
    """
    k = k.astype(np.float32)
    minimum = k.min(axis=-2) + np.float32(0)  # the sign of a zero must not depend on the order of a reduction
    maximum = k.max(axis=-2)
    levels = np.float32(2**bits - 1)
    need = ((maximum - minimum) / levels).view(np.uint32)
    log_code = ((need + np.uint32(0x7FFFF)) >> np.uint32(19)).astype(np.int32)
    top = np.maximum(log_code.max(axis=-1) >> 4, 127 + SCALE_MIN_EXPONENT)
    base = top - 15 - EXPONENT_OFFSET
    scale_codes = np.maximum(log_code - ((base + EXPONENT_OFFSET) * 16)[..., None], 0)
    scale = key_scale(scale_codes, base)
    inverse = np.float32(1) / scale
    codes = np.rint((k - minimum[..., None, :]) * inverse[..., None, :])
    codes = np.minimum(codes, levels).astype(np.uint32)
    return codes, scale_codes.astype(np.uint8), minimum.astype(np.float16), base.astype(np.uint8)


def key_scale(scale_codes: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Key scales, float32 ``[..., head_dim]``, from their codes and the base ``[...]`` of the page."""
    log_code = scale_codes.astype(np.int32) + ((base.astype(np.int32) + EXPONENT_OFFSET) * 16)[..., None]
    return (log_code.astype(np.uint32) << np.uint32(19)).view(np.float32)


def quantize_values(
    v: np.ndarray, bits: int, base: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Quantize the (rotated) values of a page.

    Parameters
    ----------
    v : np.ndarray
        Rows of a full page, float16 ``[..., page, head_dim]``.
    base : np.ndarray, optional
        K base ``[...]`` that the lowest bits of the first eight scales must carry.

    Returns
    -------
    codes : np.ndarray
        uint32 ``[..., page, head_dim]``.
    scale : np.ndarray
        Signed float16 ``[..., page]``.
    """
    v = v.astype(np.float32)
    high, low = v.max(axis=-1), v.min(axis=-1)
    extreme = np.where(high > -low, high, low) + np.float32(0)
    half = 2 ** (bits - 1)
    scale_bits = (extreme * np.float32(-1.0 / half)).astype(np.float16).view(np.uint16).astype(np.uint32)
    scale_bits = np.maximum(scale_bits & 0x7FFF, 2) | (scale_bits & 0x8000)
    if base is not None:
        wanted = (base.astype(np.uint32)[..., None] >> np.arange(BASE_BITS, dtype=np.uint32)) & 1
        first = scale_bits[..., :BASE_BITS]
        scale_bits[..., :BASE_BITS] = first + ((first & 1) ^ wanted)
    scale = scale_bits.astype(np.uint16).view(np.float16)
    inverse = np.float32(1) / scale.astype(np.float32)
    codes = np.clip(np.rint(v * inverse[..., None]) + np.float32(half), 0, 2**bits - 1)
    return codes.astype(np.uint32), scale


def _pack_keys(codes: np.ndarray, layout: KVLayout) -> np.ndarray:
    if layout.order == "fragments":
        return fragments.pack(codes, layout.k_bits or 0, fragments.KEYS)
    lead = codes.shape[:-2]
    per_lane = codes.reshape(*lead, layout.page_size // K_LANES, K_LANES, layout.head_dim)
    stream = np.moveaxis(per_lane, (-1, -3, -2), (-3, -2, -1))  # [..., channel, q, lane]
    stream = stream.reshape(*lead, -1, CODES_PER_CHUNK, K_LANES)
    words = pack_codes(np.moveaxis(stream, -2, -1), layout.k_bits or 0)  # [..., chunk, lane, b]
    return np.moveaxis(words, -1, -2).reshape(*lead, -1)


def _unpack_keys(words: np.ndarray, layout: KVLayout) -> np.ndarray:
    if layout.order == "fragments":
        return fragments.unpack(words, layout, layout.k_bits or 0, fragments.KEYS)
    lead, bits = words.shape[:-1], layout.k_bits or 0
    chunks = words.reshape(*lead, -1, bits, K_LANES)
    stream = np.moveaxis(unpack_codes(np.moveaxis(chunks, -2, -1), bits), -1, -2)  # [..., chunk, 32, lane]
    per_lane = stream.reshape(*lead, layout.head_dim, layout.page_size // K_LANES, K_LANES)
    return np.moveaxis(per_lane, (-3, -2, -1), (-1, -3, -2)).reshape(*lead, layout.page_size, layout.head_dim)


def _pack_values(codes: np.ndarray, layout: KVLayout) -> np.ndarray:
    if layout.order == "fragments":
        return fragments.pack(codes, layout.v_bits or 0, fragments.VALUES)
    lead = codes.shape[:-2]
    chunks = codes.reshape(*lead, -1, CODES_PER_CHUNK, layout.head_dim)
    words = pack_codes(np.moveaxis(chunks, -2, -1), layout.v_bits or 0)  # [..., chunk, channel, b]
    return np.moveaxis(words, -1, -2).reshape(*lead, -1)


def _unpack_values(words: np.ndarray, layout: KVLayout) -> np.ndarray:
    if layout.order == "fragments":
        return fragments.unpack(words, layout, layout.v_bits or 0, fragments.VALUES)
    lead, bits = words.shape[:-1], layout.v_bits or 0
    chunks = words.reshape(*lead, -1, bits, layout.head_dim)
    codes = np.moveaxis(unpack_codes(np.moveaxis(chunks, -2, -1), bits), -1, -2)
    return codes.reshape(*lead, layout.page_size, layout.head_dim)


def _as_words(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint32)


def _pack_rows(rows: np.ndarray, layout: KVLayout, side: fragments.Side) -> np.ndarray:
    """Words of an unquantized component of a page, from its rows ``[..., page, head_dim]``."""
    if layout.order == "fragments" and layout.row_dtype == "float16":
        return fragments.pack(rows.view(np.uint16), 16, side)
    if layout.order == "lanes" and side is fragments.KEYS:
        rows = np.swapaxes(rows, -1, -2)
    return _as_words(rows.reshape(*rows.shape[:-2], -1))


def _unpack_rows(words: np.ndarray, layout: KVLayout, side: fragments.Side) -> np.ndarray:
    """The inverse of :func:`_pack_rows`."""
    page, dim = layout.page_size, layout.head_dim
    if layout.order == "fragments" and layout.row_dtype == "float16":
        return fragments.unpack(words, layout, 16, side).astype(np.uint16).view(np.float16)
    transposed = layout.order == "lanes" and side is fragments.KEYS
    shape = (*words.shape[:-1], dim, page) if transposed else (*words.shape[:-1], page, dim)
    rows = words.view(layout.row_dtype).reshape(shape)
    return np.swapaxes(rows, -1, -2) if transposed else rows


def seal_unit(k: np.ndarray, v: np.ndarray, layout: KVLayout) -> np.ndarray:
    """Seal full pages: the words of their units.

    Parameters
    ----------
    k, v : np.ndarray
        Rows in ``layout.row_dtype``, ``[..., page, head_dim]``; K after RoPE, V rotated if V is
        quantized.

    Returns
    -------
    np.ndarray
        uint32 ``[..., layout.unit_words]``.
    """
    lead = k.shape[:-2]
    parts = []
    base = None
    if layout.k_bits is None:
        parts.append(_pack_rows(k, layout, fragments.KEYS))
    else:
        codes, scale_codes, minimum, base = quantize_keys(k, layout.k_bits)
        parts += [_pack_keys(codes, layout), _as_words(scale_codes), _as_words(minimum)]
    if layout.v_bits is None:
        parts.append(_pack_rows(v, layout, fragments.VALUES))
        if base is not None:
            own = np.zeros((*lead, layout.unit_words - layout.k_base_offset), np.uint32)
            own[..., 0] = base
            parts.append(own)
    else:
        codes, scale = quantize_values(v, layout.v_bits, base)
        parts += [_pack_values(codes, layout), _as_words(scale)]
    return np.concatenate(parts, axis=-1)


def unpack_unit(words: np.ndarray, layout: KVLayout) -> dict[str, np.ndarray]:
    """Decode units to codes, scales and dequantized values.

    Parameters
    ----------
    words : np.ndarray
        uint32 ``[..., layout.unit_words]``.

    Returns
    -------
    dict
        ``k``, ``v`` (float32 ``[..., page, head_dim]``; ``v`` rotated as stored), ``v_unrotated``, and
        for a quantized component ``k_codes``, ``k_scale``, ``k_min``, ``k_base``, ``v_codes``, ``v_scale``.
    """
    out: dict[str, np.ndarray] = {}
    v_raw = np.ascontiguousarray(words[..., layout.v_offset : layout.v_scale_offset])
    if layout.v_bits is None:
        out["v"] = _unpack_rows(v_raw, layout, fragments.VALUES).astype(np.float32)
        out["v_unrotated"] = out["v"]
    else:
        scales = np.ascontiguousarray(words[..., layout.v_scale_offset : layout.k_base_offset])
        out["v_scale"] = scales.view(np.float16)
        out["v_codes"] = _unpack_values(v_raw, layout)
        centred = out["v_codes"].astype(np.float32) - np.float32(2 ** (layout.v_bits - 1))
        out["v"] = centred * out["v_scale"].astype(np.float32)[..., None]
        out["v_unrotated"] = out["v"] @ hadamard(layout.head_dim)
    k_raw = np.ascontiguousarray(words[..., : layout.k_scale_offset])
    if layout.k_bits is None:
        out["k"] = _unpack_rows(k_raw, layout, fragments.KEYS).astype(np.float32)
        return out
    if layout.base_in_v_scales:
        lowest = out["v_scale"].view(np.uint16)[..., :BASE_BITS] & 1
        base = (lowest.astype(np.int32) << np.arange(BASE_BITS)).sum(axis=-1)
    else:
        base = words[..., layout.k_base_offset].astype(np.int32)
    scale_codes = np.ascontiguousarray(words[..., layout.k_scale_offset : layout.k_min_offset]).view(np.uint8)
    out["k_base"] = base
    out["k_scale"] = key_scale(scale_codes, base)
    out["k_min"] = np.ascontiguousarray(words[..., layout.k_min_offset : layout.v_offset]).view(np.float16)
    out["k_codes"] = _unpack_keys(k_raw, layout)
    out["k"] = out["k_codes"].astype(np.float32) * out["k_scale"][..., None, :]
    out["k"] += out["k_min"].astype(np.float32)[..., None, :]
    return out
