"""Packed codes to operands of ``mma``: a mask, and a shift for some, and no arithmetic.

The codes of a pair stand in the two halves of a word (:mod:`kvq.quantization.fragments`). Masked, a field
that lies within the lowest ten bits of a half *is* an fp16 number, a denormal one: ``code * 2**(offset -
24)``. Tensor cores take denormals exactly and at full speed. So two fields of a half need no shift at all:
even pairs are read at offset 0 and odd pairs at an offset of ``bits``, and their factor ``2**bits`` is taken
out of the query (keys) or of the result (values).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd

from tvm.script import tirx as T

from kvq.layout import FRAGMENT_TILE, KVLayout

from .mma import WARP, load_shared, u32

#: Binary exponent of the unit of a denormal half.
UNIT_EXPONENT = -24
#: Pairs of a tile in a lane, and of what is packed together.
TILE_PAIRS, CHUNK_PAIRS = 4, 16


def odd_offset(bits: int) -> int:
    """Bit offset at which odd pairs are read; their codes come out ``2**odd_offset`` too large."""
    return bits if bits < 8 else 0


@dataclass(frozen=True)
class Codes:
    """One component, K or V, of the pages of a layout.

    Attributes
    ----------
    classes : tuple of (bits, channels)
        Widths of the codes in the order in which channels are stored; 16 bits where it is not quantized.
    page : int
        Tokens of a page.
    block : int
        Tokens whose tiles of each width are packed together.
    """

    classes: tuple[tuple[int, int], ...]
    page: int
    block: int

    @staticmethod
    def keys(layout: KVLayout) -> Codes:
        """The keys of ``layout``."""
        classes = layout.k_classes if layout.k_bits else ((16, layout.head_dim),)
        return Codes(classes, layout.page_size, layout.k_block_tokens)

    @staticmethod
    def values(layout: KVLayout) -> Codes:
        """The values of ``layout``."""
        classes = ((layout.v_bits or 16, layout.head_dim),)
        block = FRAGMENT_TILE * 4 // gcd(4, layout.head_dim // FRAGMENT_TILE)
        return Codes(classes, layout.page_size, min(block, layout.page_size))

    @property
    def largest_offset(self) -> int:
        """The largest :func:`odd_offset`."""
        return max(odd_offset(bits) for bits, _ in self.classes)

    def lane_words(self, tokens: int) -> int:
        """Words of a lane for ``tokens`` tokens."""
        return sum(tokens * channels * bits for bits, channels in self.classes) // (32 * WARP)

    @property
    def vector(self) -> int:
        """Words of a lane that lie together."""
        return gcd(self.lane_words(self.page), 4)

    def bytes(self, tokens: int) -> int:
        """Bytes of ``tokens`` tokens."""
        return self.lane_words(tokens) * 4 * WARP

    def divides_at(self, tokens: int) -> bool:
        """Whether ``tokens`` tokens can be loaded on their own."""
        return tokens % self.block == 0 and self.lane_words(tokens) % self.vector == 0

    def place(self, row: int, step: int) -> tuple[int, int, int]:
        """Bits of tile ``(row, step)``, the first word of its chunk in the lane, and its first pair there."""
        rows = self.block // FRAGMENT_TILE
        block, row = divmod(row, rows)
        first = block * self.lane_words(self.block)
        for bits, channels in self.classes:
            steps = channels // FRAGMENT_TILE
            if step < steps:
                chunk, pair = divmod((row * steps + step) * TILE_PAIRS, CHUNK_PAIRS)
                return bits, first + chunk * bits, pair
            step -= steps
            first += rows * steps * TILE_PAIRS * bits // CHUNK_PAIRS
        raise AssertionError("no such tile")

    def words_of(self, row: int, step: int) -> range:
        """The lane's words that a tile lies in."""
        bits, first, pair = self.place(row, step)
        return range(first + pair, first + pair + TILE_PAIRS) if bits == 16 else range(first, first + bits)

    def pairs(self, words, row: int, step: int) -> list:
        """The four registers of a tile, by pair, from the lane's words."""
        bits, first, pair = self.place(row, step)
        return [_register(words, first, pair + i, bits) for i in range(TILE_PAIRS)]


def _register(words, first: int, pair: int, bits: int):
    """Register of a pair of the chunk that starts at word ``first``."""
    if bits == 16:
        return words[first + pair]
    fields = 16 // bits
    offset = odd_offset(bits) if pair % 2 else 0
    if pair < fields * bits:
        return _field(words[first + pair // fields], pair % fields * bits, offset, 2**bits - 1)
    parts = [_field(words[first + w], pair, offset + w, 1) for w in range(bits)]
    found = parts[0]
    for part in parts[1:]:
        found = T.bitwise_or(found, part)
    return found


def _field(word, position: int, offset: int, mask: int):
    """The bits of ``mask`` at ``position`` in both halves, moved to ``offset``."""
    if position > offset:
        word = T.shift_right(word, u32(position - offset))
    elif position < offset:
        word = T.shift_left(word, u32(offset - position))
    return T.bitwise_and(word, u32((mask << offset) * 0x10001))


class LaneWords:
    """The words of a lane for one load of ``tokens`` tokens, brought from shared memory when first needed."""

    def __init__(self, codes: Codes, tokens: int, address, offset: int) -> None:
        self.codes, self.address, self.offset = codes, address, offset
        self.words = T.alloc_local([codes.lane_words(tokens)], "uint32")
        self.loaded: set[int] = set()

    def need(self, tiles: Iterable[tuple[int, int]]) -> None:
        """Load what the tiles ``(row, step)`` lie in."""
        vector = self.codes.vector
        for tile in tiles:
            for index in sorted({word // vector for word in self.codes.words_of(*tile)} - self.loaded):
                self.loaded.add(index)
                at = self.offset + index * WARP * vector * 4
                load_shared(self.words, index * vector, vector, self.address, at)

    def pairs(self, row: int, step: int) -> list:
        """The four registers of a tile, by pair."""
        return self.codes.pairs(self.words, row, step)
