"""The order of codes that vector units want: a code of each of 16 tokens, or of each channel, side by side.

:mod:`kvq.layout` draws the words. Tensor cores have an order of their own, :mod:`kvq.quantization.fragments`.
"""

from __future__ import annotations

import numpy as np

from kvq.layout import CODES_PER_CHUNK, K_LANES, KVLayout


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack 32 codes into ``bits`` words.

    Codes of 1, 2, 4 or 8 bits lie in order. Of 3-bit (5-bit) codes, words hold ten (six) each in their
    low 30 bits; the last two codes lie across the top two bits of all words.

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
    per_word = 32 // bits
    for i in range(per_word * bits):
        words[..., i // per_word] |= codes[..., i] << np.uint32(bits * (i % per_word))
    for i in range(per_word * bits, CODES_PER_CHUNK):
        for w in range(bits):
            words[..., w] |= ((codes[..., i] >> np.uint32(w)) & np.uint32(1)) << np.uint32(i)
    return words


def unpack_codes(words: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of :func:`pack_codes`: uint32 ``[..., bits]`` to uint32 ``[..., 32]``."""
    words = words.astype(np.uint32)
    codes = np.zeros((*words.shape[:-1], CODES_PER_CHUNK), np.uint32)
    mask = np.uint32(2**bits - 1)
    per_word = 32 // bits
    for i in range(per_word * bits):
        codes[..., i] = (words[..., i // per_word] >> np.uint32(bits * (i % per_word))) & mask
    for i in range(per_word * bits, CODES_PER_CHUNK):
        for w in range(bits):
            codes[..., i] |= ((words[..., w] >> np.uint32(i)) & np.uint32(1)) << np.uint32(w)
    return codes


def pack_keys(codes: np.ndarray, layout: KVLayout, order: np.ndarray | None = None) -> np.ndarray:
    """Words of key codes ``[..., page, head_dim]``; ``order`` lists the channels as they are stored."""
    if order is not None:
        codes = np.take_along_axis(codes, order[..., None, :], axis=-1)
    lead, parts, start = codes.shape[:-2], [], 0
    for bits, channels in layout.k_classes:
        part = codes[..., start : start + channels]
        per_lane = part.reshape(*lead, layout.page_size // K_LANES, K_LANES, channels)
        stream = np.moveaxis(per_lane, (-1, -3, -2), (-3, -2, -1))  # [..., channel, q, lane]
        stream = stream.reshape(*lead, -1, CODES_PER_CHUNK, K_LANES)
        words = pack_codes(np.moveaxis(stream, -2, -1), bits)  # [..., chunk, lane, b]
        parts.append(np.moveaxis(words, -1, -2).reshape(*lead, -1))
        start += channels
    return np.concatenate(parts, axis=-1)


def unpack_keys(words: np.ndarray, layout: KVLayout, order: np.ndarray | None = None) -> np.ndarray:
    """The inverse of :func:`pack_keys`."""
    lead, parts, start = words.shape[:-1], [], 0
    for bits, channels in layout.k_classes:
        end = start + channels * layout.page_size * bits // 32
        chunks = words[..., start:end].reshape(*lead, -1, bits, K_LANES)
        stream = np.moveaxis(
            unpack_codes(np.moveaxis(chunks, -2, -1), bits), -1, -2
        )  # [..., chunk, 32, lane]
        per_lane = stream.reshape(*lead, channels, layout.page_size // K_LANES, K_LANES)
        part = np.moveaxis(per_lane, (-3, -2, -1), (-1, -3, -2))
        parts.append(part.reshape(*lead, layout.page_size, channels))
        start = end
    stored = np.concatenate(parts, axis=-1)
    if order is None:
        return stored
    codes = np.empty_like(stored)
    np.put_along_axis(codes, np.broadcast_to(order[..., None, :], stored.shape), stored, axis=-1)
    return codes


def pack_values(codes: np.ndarray, layout: KVLayout) -> np.ndarray:
    """Words of value codes ``[..., page, head_dim]``."""
    lead = codes.shape[:-2]
    chunks = codes.reshape(*lead, -1, CODES_PER_CHUNK, layout.head_dim)
    words = pack_codes(np.moveaxis(chunks, -2, -1), layout.v_bits or 0)  # [..., chunk, channel, b]
    return np.moveaxis(words, -1, -2).reshape(*lead, -1)


def unpack_values(words: np.ndarray, layout: KVLayout) -> np.ndarray:
    """The inverse of :func:`pack_values`."""
    lead, bits = words.shape[:-1], layout.v_bits or 0
    chunks = words.reshape(*lead, -1, bits, layout.head_dim)
    codes = np.moveaxis(unpack_codes(np.moveaxis(chunks, -2, -1), bits), -1, -2)
    return codes.reshape(*lead, layout.page_size, layout.head_dim)
