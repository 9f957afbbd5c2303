"""The order of codes that tensor cores want: operand A of ``mma.m16n8k16``, straight from memory.

A page is cut into tiles of 16 tokens and 16 channels; a warp multiplies a tile with one instruction, and
its lane ``4 g + c`` holds 8 of the tile's codes in four registers of two halves. Keys stand in A with
tokens as rows, values with channels as rows; both products may run through the page in any order, so
tokens and channels are dealt out such that what a lane needs of scales, minimums and queries is contiguous:

* keys: lane ``(g, c)`` has tokens ``g P/8 + 2 T + x`` and channels ``c D/4 + 4 t + 2 y + h``;
* values: lane ``(g, c)`` has tokens ``(2 c + h) P/8 + 2 T + x`` and channels ``g D/8 + 2 t + y``

of tile ``(T, t)``, ``T`` of ``P/16`` and ``t`` of ``D/16``. A lane's codes are ordered by ``(T, t, x, y)``,
as *pairs* over ``h``: the code of ``h = 0`` goes to the low half of a word, that of ``h = 1`` to the high
half. Sixteen pairs are packed into ``bits`` words: halves of 16 bits hold ``16 // bits`` codes from the
lowest bit up; of 3-bit codes, each of three halves holds five, and the last lies across their top bits.
Halves of 16 bits are fp16 rows as they are.

The ``W`` words of a lane lie in vectors of ``gcd(W, 4)`` words, lane after lane.
"""

from __future__ import annotations

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
KEYS = Side((8, -1, 2), (4, -1, 2, 2), (0, 3, 1, 4, 2, 5, 6))
#: Tokens are (c, h, T, x), channels (g, t, y).
VALUES = Side((4, 2, -1, 2), (8, -1, 2), (4, 0, 2, 5, 3, 6, 1))


def vector_words(page: int, dim: int, bits: int) -> int:
    """Words that a lane loads at once."""
    return gcd(page * dim * bits // (32 * WARP), 4)


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


def pack(codes: np.ndarray, bits: int, side: Side) -> np.ndarray:
    """Words of a page's codes.

    Parameters
    ----------
    codes : np.ndarray
        Integers below ``2**bits``, ``[..., page, head_dim]``.
    bits : int
        8, 4, 3, 2, or 16 for the bits of fp16 rows.
    side : Side
        :data:`KEYS` or :data:`VALUES`.

    Returns
    -------
    np.ndarray
        uint32 ``[..., page * head_dim * bits / 32]``.
    """
    lead, (page, dim) = codes.shape[:-2], codes.shape[-2:]
    n = len(lead)
    split = codes.astype(np.uint16).reshape(*lead, *side.shape(page, dim))
    lanes = split.transpose(*range(n), *(n + axis for axis in side.order)).reshape(*lead, WARP, -1, PAIRS, 2)
    halves = pack_halves(np.moveaxis(lanes, -1, -2), bits).astype(np.uint32)  # [..., lane, chunk, h, bits]
    words = halves[..., 0, :] | halves[..., 1, :] << np.uint32(16)
    vectors = words.reshape(*lead, WARP, -1, vector_words(page, dim, bits))
    return np.swapaxes(vectors, -2, -3).reshape(*lead, -1)


def unpack(words: np.ndarray, layout: KVLayout, bits: int, side: Side) -> np.ndarray:
    """The inverse of :func:`pack`: uint32 codes ``[..., page, head_dim]``."""
    lead, page, dim = words.shape[:-1], layout.page_size, layout.head_dim
    n = len(lead)
    vectors = words.reshape(*lead, -1, WARP, vector_words(page, dim, bits))
    chunks = np.swapaxes(vectors, -2, -3).reshape(*lead, WARP, -1, bits)
    halves = np.stack([chunks & np.uint32(0xFFFF), chunks >> np.uint32(16)], axis=-2).astype(np.uint16)
    pairs = np.moveaxis(unpack_halves(halves, bits), -2, -1)  # [..., lane, chunk, pair, h]
    shape = side.shape(page, dim)
    lanes = pairs.reshape(*lead, *(shape[axis] for axis in side.order))
    inverse = np.argsort(side.order)
    split = lanes.transpose(*range(n), *(n + int(axis) for axis in inverse))
    return split.reshape(*lead, page, dim).astype(np.uint32)
