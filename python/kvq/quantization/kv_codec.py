"""Numpy reference of the KV formats: what a sealed page holds, bit for bit.

The kernels must produce exactly these words. Arithmetic is float32 in the order written here; the
layout of the words is :class:`kvq.layout.KVLayout`'s, how numbers become words :mod:`.kv_words`'s.

Keys have a scale and a minimum per channel over the page. The scale is a minifloat, rounded up so
that the range of the page is never clipped, relative to a power of two kept per page and head. Where
widths are mixed, the channels that matter most get more bits: a pair's weight is the energy of its ranges
times the root of its energy in the queries of the page's last token. A rotation of the pair changes neither.
Values, rotated by an orthonormal Hadamard transform when they were appended, have one signed fp16
scale a token: the element of largest magnitude sits on the most negative code.
"""

from __future__ import annotations

import numpy as np

from kvq.layout import (
    BASE_BITS,
    SCALE_BIAS,
    SCALE_MIN_EXPONENT,
    KVLayout,
)
from kvq.quantization import fragments, kv_words

#: A scale's float32 bits, shifted down to its 4 mantissa bits, minus those of its code, is
#: ``16 * (base + _EXPONENT_OFFSET)``.
EXPONENT_OFFSET = 127 - SCALE_BIAS
#: Energy of a pair's queries above which it counts as none, as NaN does: weights must stay finite.
MAX_ENERGY = 1e30


def hadamard(dim: int) -> np.ndarray:
    """Orthonormal block-diagonal Hadamard matrix, float32 ``[dim, dim]``.

    ``dim = b * 2**n`` with odd ``b`` gives ``b`` blocks of size ``2**n``. It is its own inverse.
    """
    block = dim & -dim
    h = np.ones((1, 1))
    while len(h) < block:
        h = np.block([[h, h], [h, -h]])
    return np.kron(np.eye(dim // block), h / np.sqrt(block)).astype(np.float32)


def sanitize(x: np.ndarray) -> np.ndarray:
    """What ``append`` stores of float32 rows: NaN becomes 0, magnitudes saturate at 65504; fp16."""
    return np.clip(np.nan_to_num(x, nan=0.0, posinf=65504.0, neginf=-65504.0), -65504.0, 65504.0).astype(
        np.float16
    )


def key_widths(k: np.ndarray, queries: np.ndarray | None, layout: KVLayout) -> np.ndarray:
    """How many bits each channel of a page gets.

    Parameters
    ----------
    k : np.ndarray
        Rows of a full page, float16 ``[..., page, head_dim]``.
    queries : np.ndarray, optional
        Queries of the page's last token, float32 ``[..., group, head_dim]``, up to a common factor; all of
        the same energy by default.

    Returns
    -------
    np.ndarray
        int32 ``[..., head_dim]``.
    """
    half = layout.head_dim // 2
    spread = (k.max(axis=-2).astype(np.float32) - k.min(axis=-2)) ** 2
    weight = spread[..., :half] + spread[..., half:]
    if queries is not None:
        energy = np.zeros_like(weight)
        with np.errstate(over="ignore"):
            for g in range(queries.shape[-2]):
                squares = queries[..., g, :].astype(np.float32) ** 2
                energy = energy + (squares[..., :half] + squares[..., half:])
        energy = np.where(energy <= np.float32(MAX_ENERGY), energy, np.float32(0))
        weight = weight * np.sqrt(energy)
    order = np.argsort(-weight, axis=-1, kind="stable")
    of_rank = np.concatenate([np.full(n // 2, bits, np.int32) for bits, n in layout.k_classes])
    widths = np.empty(weight.shape, np.int32)
    np.put_along_axis(widths, order, np.broadcast_to(of_rank, order.shape), axis=-1)
    return np.concatenate([widths, widths], axis=-1)


def quantize_keys(
    k: np.ndarray, bits: int | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Quantize the keys of a page.

    Parameters
    ----------
    k : np.ndarray
        Rows of a full page, float16 ``[..., page, head_dim]``.
    bits : int or np.ndarray
        Width of the codes: of all, or int32 ``[..., head_dim]``.

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
    levels = (np.left_shift(1, bits) - 1).astype(np.float32)
    need = ((maximum - minimum) / levels).view(np.uint32)
    log_code = ((need + np.uint32(0x7FFFF)) >> np.uint32(19)).astype(np.int32)
    top = np.maximum(log_code.max(axis=-1) >> 4, 127 + SCALE_MIN_EXPONENT)
    base = top - 15 - EXPONENT_OFFSET
    scale_codes = np.maximum(log_code - ((base + EXPONENT_OFFSET) * 16)[..., None], 0)
    scale = key_scale(scale_codes, base)
    inverse = np.float32(1) / scale
    codes = np.rint((k - minimum[..., None, :]) * inverse[..., None, :])
    codes = np.minimum(codes, levels if np.ndim(levels) == 0 else levels[..., None, :]).astype(np.uint32)
    return codes, scale_codes.astype(np.uint8), minimum.astype(np.float16), base.astype(np.uint8)


def key_scale(scale_codes: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Key scales, float32 ``[..., head_dim]``, from their codes and the base ``[...]`` of the page."""
    log_code = scale_codes.astype(np.int32) + ((base.astype(np.int32) + EXPONENT_OFFSET) * 16)[..., None]
    return (log_code.astype(np.uint32) << np.uint32(19)).view(np.float32)


def quantize_values(
    v: np.ndarray, bits: int, header: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Quantize the (rotated) values of a page.

    Parameters
    ----------
    v : np.ndarray
        Rows of a full page, float16 ``[..., page, head_dim]``.
    header : np.ndarray, optional
        Bits ``[..., n]`` that the lowest bits of the scales must carry.

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
    if header is not None:
        page = v.shape[-2]
        masks = kv_words.carried_masks(header.shape[-1], page)
        scale_bits += (kv_words.to_carried(header, page) - scale_bits) & masks
    scale = scale_bits.astype(np.uint16).view(np.float16)
    inverse = np.float32(1) / scale.astype(np.float32)
    codes = np.clip(np.rint(v * inverse[..., None]) + np.float32(half), 0, 2**bits - 1)
    return codes.astype(np.uint32), scale


def seal_unit(k: np.ndarray, v: np.ndarray, layout: KVLayout, widths: np.ndarray | None = None) -> np.ndarray:
    """Seal full pages: the words of their units.

    Parameters
    ----------
    k, v : np.ndarray
        Rows in ``layout.row_dtype``, ``[..., page, head_dim]``; K after RoPE, V rotated if V is
        quantized.
    widths : np.ndarray, optional
        Widths of the K codes where they are mixed, as :func:`key_widths` gives them; by default those of
        queries that have the same energy everywhere.

    Returns
    -------
    np.ndarray
        uint32 ``[..., layout.unit_words]``.
    """
    parts: list[np.ndarray] = []
    header = None
    if layout.k_bits is None:
        parts.append(kv_words.pack_rows(k, layout, fragments.KEY_ROWS))
    else:
        if len(layout.k_classes) == 1:
            widths = None
        elif widths is None:
            widths = key_widths(k, None, layout)
        codes, scale_codes, minimum, base = quantize_keys(k, layout.k_bits if widths is None else widths)
        parts += [
            kv_words.pack_keys(codes, layout, widths),
            kv_words.as_words(scale_codes),
            kv_words.as_words(minimum),
        ]
        header = kv_words.key_header(base, widths, layout.k_bits)
    carried = header if layout.header_in_v_scales else None
    if layout.v_bits is None:
        parts.append(kv_words.pack_rows(v, layout, fragments.VALUES))
    else:
        codes, scale = quantize_values(v, layout.v_bits, carried)
        parts += [kv_words.pack_values(codes, layout), kv_words.as_words(scale)]
    if header is not None and carried is None:
        parts.append(kv_words.pack_header(header, layout.unit_words - layout.k_header_offset))
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
        for a quantized component ``k_codes``, ``k_scale``, ``k_min``, ``k_base``, ``k_widths`` (int32 ``[...,
        head_dim]``), ``v_codes``, ``v_scale``.
    """
    out: dict[str, np.ndarray] = {}
    v_raw = np.ascontiguousarray(words[..., layout.v_offset : layout.v_scale_offset])
    if layout.v_bits is None:
        out["v"] = kv_words.unpack_rows(v_raw, layout, fragments.VALUES).astype(np.float32)
        out["v_unrotated"] = out["v"]
    else:
        scales = np.ascontiguousarray(words[..., layout.v_scale_offset : layout.k_header_offset])
        out["v_scale"] = scales.view(np.float16)
        out["v_codes"] = kv_words.unpack_values(v_raw, layout)
        centred = out["v_codes"].astype(np.float32) - np.float32(2 ** (layout.v_bits - 1))
        out["v"] = centred * out["v_scale"].astype(np.float32)[..., None]
        out["v_unrotated"] = out["v"] @ hadamard(layout.head_dim)
    k_raw = np.ascontiguousarray(words[..., : layout.k_scale_offset])
    if layout.k_bits is None:
        out["k"] = kv_words.unpack_rows(k_raw, layout, fragments.KEY_ROWS).astype(np.float32)
        return out
    if layout.header_in_v_scales:
        header = kv_words.from_carried(out["v_scale"], layout.k_header_bits)
    else:
        own = words[..., layout.k_header_offset : layout.unit_words]
        header = kv_words.unpack_header(own)[..., : layout.k_header_bits]
    base = (header[..., -BASE_BITS:].astype(np.int32) << np.arange(BASE_BITS, dtype=np.int32)).sum(axis=-1)
    scale_codes = np.ascontiguousarray(words[..., layout.k_scale_offset : layout.k_min_offset]).view(np.uint8)
    out["k_base"] = base
    out["k_scale"] = key_scale(scale_codes, base)
    out["k_min"] = np.ascontiguousarray(words[..., layout.k_min_offset : layout.v_offset]).view(np.float16)
    out["k_widths"] = np.full(scale_codes.shape, layout.k_bits, np.int32)
    if len(layout.k_classes) > 1:
        wider, narrower = np.split(header[..., :-BASE_BITS].astype(np.int32), 2, axis=-1)
        out["k_widths"] += np.concatenate([wider - narrower] * 2, axis=-1)
    out["k_codes"] = kv_words.unpack_keys(k_raw, layout, out["k_widths"])
    out["k"] = out["k_codes"].astype(np.float32) * out["k_scale"][..., None, :]
    out["k"] += out["k_min"].astype(np.float32)[..., None, :]
    return out
