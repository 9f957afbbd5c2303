"""The order of codes that tensor cores want: operand A of ``mma.m16n8k16``, straight from memory.

A page is cut into tiles of 16 tokens and 16 channels; a warp multiplies a tile with one instruction, and
its lane ``4 g + c`` holds 8 of the tile's numbers in four registers of two halves. Keys stand in A with
tokens as rows, values with channels as rows, and either stands so in B as well, half a tile at a time. Both
products may run through the page in any order, so tokens and channels are dealt out such that what a lane
needs besides is contiguous:

* key codes: lane ``(g, c)`` has tokens ``g P/8 + 2 T + x`` and, of the channels as they are stored, ``16 t +
  8 y + 2 c + h``. Channels are stored in RoPE pairs ``(p, p + D/2)``, widest codes first, so a pair lies in a
  register and a tile has codes of one width;
* keys as rows: the same tokens, and channels ``c D/4 + 4 t + 2 y + h``;
* values: lane ``(g, c)`` has tokens ``(2 c + h) P/8 + 2 T + x`` and channels ``g D/8 + 2 t + y``

of tile ``(T, t)``, ``T`` of ``P/16`` and ``t`` of ``D/16``. A lane's codes are ordered by ``(T, t, x, y)``,
as *pairs* over ``h``: the code of ``h = 0`` goes to the low half of a word, that of ``h = 1`` to the high
half. Sixteen pairs are packed into ``bits`` words: halves of 16 bits hold ``16 // bits`` codes from the
lowest bit up; of 3-bit (5-bit) codes, each of three (five) halves holds five (three), and the last lies
across their top bits. Where widths are mixed, the tiles of each width are packed apart, for every
``k_block_tokens`` tokens: just so many that words are filled.
Halves of 16 bits are fp16 rows as they are.

The ``W`` words of a lane lie in vectors of ``gcd(W, 4)`` words, lane after lane.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import numpy as np

from kvq.layout import FRAGMENT_TILE, KVLayout

#: Lanes of a warp.
WARP = 32
#: Pairs that are packed together.
PAIRS = 16


@dataclass(frozen=True)
class Side:
    """How a page ``[P, D]`` splits into axes, and their order in memory: g, c, T, t, x, y, h."""

    token_axes: tuple[int, ...]
    channel_axes: tuple[int, ...]
    order: tuple[int, ...]

    def shape(self, page: int, dim: int) -> tuple[int, ...]:
        """The page's axes with their sizes; -1 in the fields stands for the number of tiles."""
        tokens = (page // FRAGMENT_TILE if n < 0 else n for n in self.token_axes)
        channels = (dim // FRAGMENT_TILE if n < 0 else n for n in self.channel_axes)
        return (*tokens, *channels)


#: Tokens are (g, T, x), channels (c, t, y, h).
KEY_ROWS = Side((8, -1, 2), (4, -1, 2, 2), (0, 3, 1, 4, 2, 5, 6))
#: Tokens are (g, T, x), channels as they are stored (t, y, c, h).
KEY_CODES = Side((8, -1, 2), (-1, 2, 4, 2), (0, 5, 1, 3, 2, 4, 6))
#: Tokens are (c, h, T, x), channels (g, t, y).
VALUES = Side((4, 2, -1, 2), (8, -1, 2), (4, 0, 2, 5, 3, 6, 1))


def pack_halves(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack 16 codes into ``bits`` halves: uint16 ``[..., 16]`` to uint16 ``[..., bits]``."""
    halves = np.zeros((*codes.shape[:-1], bits), np.uint16)
    fields = PAIRS // bits
    for i in range(fields * bits):
        halves[..., i // fields] |= codes[..., i] << np.uint16(bits * (i % fields))
    for i in range(fields * bits, PAIRS):
        for w in range(bits):
            halves[..., w] |= ((codes[..., i] >> np.uint16(w)) & np.uint16(1)) << np.uint16(i)
    return halves


def unpack_halves(halves: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of :func:`pack_halves`."""
    codes = np.zeros((*halves.shape[:-1], PAIRS), np.uint16)
    fields, mask = PAIRS // bits, np.uint16(2**bits - 1)
    for i in range(fields * bits):
        codes[..., i] = (halves[..., i // fields] >> np.uint16(bits * (i % fields))) & mask
    for i in range(fields * bits, PAIRS):
        for w in range(bits):
            codes[..., i] |= ((halves[..., w] >> np.uint16(i)) & np.uint16(1)) << np.uint16(w)
    return codes


def _lane_words(codes: np.ndarray, bits: int, side: Side) -> np.ndarray:
    """Words of each lane, uint32 ``[..., 32, n]``, for codes ``[..., tokens, channels]``."""
    lead, (page, dim) = codes.shape[:-2], codes.shape[-2:]
    n = len(lead)
    split = codes.astype(np.uint16).reshape(*lead, *side.shape(page, dim))
    lanes = split.transpose(*range(n), *(n + axis for axis in side.order)).reshape(*lead, WARP, -1, PAIRS, 2)
    halves = pack_halves(np.moveaxis(lanes, -1, -2), bits).astype(np.uint32)  # [..., lane, chunk, h, bits]
    words = halves[..., 0, :] | halves[..., 1, :] << np.uint32(16)
    return words.reshape(*lead, WARP, -1)


def _lane_codes(words: np.ndarray, page: int, dim: int, bits: int, side: Side) -> np.ndarray:
    """The inverse of :func:`_lane_words`."""
    lead = words.shape[:-2]
    n = len(lead)
    chunks = words.reshape(*lead, WARP, -1, bits)
    halves = np.stack([chunks & np.uint32(0xFFFF), chunks >> np.uint32(16)], axis=-2).astype(np.uint16)
    pairs = np.moveaxis(unpack_halves(halves, bits), -2, -1)  # [..., lane, chunk, pair, h]
    shape = side.shape(page, dim)
    lanes = pairs.reshape(*lead, *(shape[axis] for axis in side.order))
    inverse = np.argsort(side.order)
    split = lanes.transpose(*range(n), *(n + int(axis) for axis in inverse))
    return split.reshape(*lead, page, dim).astype(np.uint32)


def _interleave(words: np.ndarray) -> np.ndarray:
    """Words of lanes ``[..., 32, n]`` as they lie in memory."""
    vectors = words.reshape(*words.shape[:-1], -1, gcd(words.shape[-1], 4))
    return np.swapaxes(vectors, -2, -3).reshape(*words.shape[:-2], -1)


def _by_lane(words: np.ndarray) -> np.ndarray:
    """The inverse of :func:`_interleave`."""
    lead, count = words.shape[:-1], words.shape[-1] // WARP
    vectors = words.reshape(*lead, -1, WARP, gcd(count, 4))
    return np.swapaxes(vectors, -2, -3).reshape(*lead, WARP, count)


def pack(codes: np.ndarray, bits: int, side: Side) -> np.ndarray:
    """Words of a page's values, or of the bits of its rows.

    Parameters
    ----------
    codes : np.ndarray
        Integers below ``2**bits``, ``[..., page, head_dim]``.
    bits : int
        8, 4, 3, 2, or 16 for the bits of fp16 rows.
    side : Side
        :data:`VALUES` or :data:`KEY_ROWS`.

    Returns
    -------
    np.ndarray
        uint32 ``[..., page * head_dim * bits / 32]``.
    """
    return _interleave(_lane_words(codes, bits, side))


def unpack(words: np.ndarray, layout: KVLayout, bits: int, side: Side) -> np.ndarray:
    """The inverse of :func:`pack`: uint32 codes ``[..., page, head_dim]``."""
    return _lane_codes(_by_lane(words), layout.page_size, layout.head_dim, bits, side)


def _key_blocks(layout: KVLayout) -> Iterator[tuple[slice, slice, int]]:
    """Rows (of 16 tokens each, as tiles count them), stored channels and width of what is packed together."""
    rows = layout.k_block_tokens // FRAGMENT_TILE
    for first in range(0, layout.page_size // FRAGMENT_TILE, rows):
        start = 0
        for bits, channels in layout.k_classes:
            yield slice(first, first + rows), slice(start, start + channels), bits
            start += channels


def pack_keys(codes: np.ndarray, layout: KVLayout, order: np.ndarray) -> np.ndarray:
    """Words of key codes ``[..., page, head_dim]``; ``order`` lists the channels as they are stored."""
    lead = codes.shape[:-2]
    stored = np.take_along_axis(codes, order[..., None, :], axis=-1).reshape(*lead, 8, -1, 2, layout.head_dim)
    parts = []
    for rows, channels, bits in _key_blocks(layout):
        tokens = (rows.stop - rows.start) * FRAGMENT_TILE
        part = stored[..., rows, :, channels].reshape(*lead, tokens, -1)
        parts.append(_lane_words(part, bits, KEY_CODES))
    return _interleave(np.concatenate(parts, axis=-1))


def unpack_keys(words: np.ndarray, layout: KVLayout, order: np.ndarray) -> np.ndarray:
    """The inverse of :func:`pack_keys`."""
    lead, page, dim = words.shape[:-1], layout.page_size, layout.head_dim
    lanes, at = _by_lane(words), 0
    stored = np.empty((*lead, 8, page // FRAGMENT_TILE, 2, dim), np.uint32)
    for rows, channels, bits in _key_blocks(layout):
        tokens, width = (rows.stop - rows.start) * FRAGMENT_TILE, channels.stop - channels.start
        count = tokens * width * bits // (32 * WARP)
        part = _lane_codes(lanes[..., at : at + count], tokens, width, bits, KEY_CODES)
        stored[..., rows, :, channels] = part.reshape(*lead, 8, -1, 2, width)
        at += count
    codes = np.empty((*lead, page, dim), np.uint32)
    np.put_along_axis(
        codes, np.broadcast_to(order[..., None, :], codes.shape), stored.reshape(codes.shape), axis=-1
    )
    return codes
