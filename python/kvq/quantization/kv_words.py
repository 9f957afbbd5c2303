"""How the numbers of a sealed page become words, and words numbers: packing, and the header of the keys."""

from __future__ import annotations

import numpy as np

from kvq.layout import BASE_BITS, KVLayout
from kvq.quantization import fragments, lanes


def key_order(widths: np.ndarray) -> np.ndarray:
    """Channels in the order in which their codes are stored: int64 ``[..., head_dim]``, from their widths.

    Widest first; of one width, pair by pair.
    """
    half = widths.shape[-1] // 2
    first = np.argsort(-widths[..., :half], axis=-1, kind="stable")
    return np.stack([first, first + half], axis=-1).reshape(widths.shape)


def carried_masks(num_bits: int, page_size: int) -> np.ndarray:
    """The lowest bits of each token's V scale that a header occupies, uint32 ``[page_size]``."""
    every, rest = divmod(num_bits, page_size)
    return (np.uint32(1) << (every + (np.arange(page_size) < rest)).astype(np.uint32)) - np.uint32(1)


def to_carried(header: np.ndarray, page_size: int) -> np.ndarray:
    """Bits ``[..., n]`` of the header dealt out to the tokens, uint32 ``[..., page_size]``."""
    carried = np.zeros((*header.shape[:-1], page_size), np.uint32)
    for i in range(header.shape[-1]):
        carried[..., i % page_size] |= header[..., i] << np.uint32(i // page_size)
    return carried


def from_carried(scale: np.ndarray, num_bits: int) -> np.ndarray:
    """The header's bits, uint32 ``[..., num_bits]``, from the V scales ``[..., page_size]``."""
    raw, page_size = scale.view(np.uint16).astype(np.uint32), scale.shape[-1]
    bits = [raw[..., i % page_size] >> np.uint32(i // page_size) for i in range(num_bits)]
    return np.stack(bits, axis=-1) & np.uint32(1)


def key_header(base: np.ndarray, widths: np.ndarray | None, bits: int) -> np.ndarray:
    """The bits of the K header, uint32 ``[..., 8]`` or ``[..., 8 + head_dim]`` where widths are mixed."""
    header = (base.astype(np.uint32)[..., None] >> np.arange(BASE_BITS, dtype=np.uint32)) & np.uint32(1)
    if widths is None:
        return header
    pairs = widths[..., : widths.shape[-1] // 2]
    return np.concatenate(
        [(pairs > bits).astype(np.uint32), (pairs < bits).astype(np.uint32), header], axis=-1
    )


def pack_header(header: np.ndarray, words: int) -> np.ndarray:
    """Bits ``[..., n]`` of a header in words of their own, uint32 ``[..., words]``."""
    bits = np.zeros((*header.shape[:-1], words * 32), np.uint32)
    bits[..., : header.shape[-1]] = header
    return lanes.pack_codes(bits.reshape(*header.shape[:-1], -1, 32), 1)[..., 0]


def unpack_header(words: np.ndarray) -> np.ndarray:
    """The inverse of :func:`pack_header`, with the bits behind the header: uint32 ``[..., 32 * words]``."""
    return lanes.unpack_codes(words[..., None], 1).reshape(*words.shape[:-1], -1)


def pack_keys(codes: np.ndarray, layout: KVLayout, widths: np.ndarray | None) -> np.ndarray:
    """Words of key codes ``[..., page, head_dim]`` in the order of the layout; ``widths`` where mixed."""
    if layout.order == "fragments":
        widths = np.full((*codes.shape[:-2], layout.head_dim), layout.k_bits) if widths is None else widths
        return fragments.pack_keys(codes, layout, key_order(widths))
    return lanes.pack_keys(codes, layout, None if widths is None else key_order(widths))


def unpack_keys(words: np.ndarray, layout: KVLayout, widths: np.ndarray) -> np.ndarray:
    """The inverse of :func:`pack_keys`."""
    if layout.order == "fragments":
        return fragments.unpack_keys(words, layout, key_order(widths))
    return lanes.unpack_keys(words, layout, key_order(widths) if len(layout.k_classes) > 1 else None)


def pack_values(codes: np.ndarray, layout: KVLayout) -> np.ndarray:
    """Words of value codes ``[..., page, head_dim]`` in the order of the layout."""
    if layout.order == "fragments":
        return fragments.pack(codes, layout.v_bits or 0, fragments.VALUES)
    return lanes.pack_values(codes, layout)


def unpack_values(words: np.ndarray, layout: KVLayout) -> np.ndarray:
    """The inverse of :func:`pack_values`."""
    if layout.order == "fragments":
        return fragments.unpack(words, layout, layout.v_bits or 0, fragments.VALUES)
    return lanes.unpack_values(words, layout)


def as_words(x: np.ndarray) -> np.ndarray:
    """An array's bytes as uint32, along its last axis."""
    return np.ascontiguousarray(x).view(np.uint32)


def pack_rows(rows: np.ndarray, layout: KVLayout, side: fragments.Side) -> np.ndarray:
    """Words of an unquantized component of a page, from its rows ``[..., page, head_dim]``."""
    if layout.order == "fragments" and layout.row_dtype == "float16":
        return fragments.pack(rows.view(np.uint16), 16, side)
    if layout.order == "lanes" and side is fragments.KEY_ROWS:
        rows = np.swapaxes(rows, -1, -2)
    return as_words(rows.reshape(*rows.shape[:-2], -1))


def unpack_rows(words: np.ndarray, layout: KVLayout, side: fragments.Side) -> np.ndarray:
    """The inverse of :func:`pack_rows`."""
    page, dim = layout.page_size, layout.head_dim
    if layout.order == "fragments" and layout.row_dtype == "float16":
        return fragments.unpack(words, layout, 16, side).astype(np.uint16).view(np.float16)
    transposed = layout.order == "lanes" and side is fragments.KEY_ROWS
    shape = (*words.shape[:-1], dim, page) if transposed else (*words.shape[:-1], page, dim)
    rows = words.view(layout.row_dtype).reshape(shape)
    return np.swapaxes(rows, -1, -2) if transposed else rows
