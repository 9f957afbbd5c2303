"""Packed codes to operand A of ``mma``: a mask, and a shift for some, and no arithmetic.

The codes of a pair stand in the two halves of a word (:mod:`kvq.quantization.fragments`). Masked, a field
that lies within the lowest ten bits of a half *is* an fp16 number, a denormal one: ``code * 2**(offset -
24)``. Tensor cores take denormals exactly and at full speed. So two fields of a half need no shift at all:
even pairs are read at offset 0 and odd pairs at an offset of ``bits``, and their factor ``2**bits`` is taken
out of the query (keys) or of the result (values).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from tvm.script import tirx as T

from kvq.layout import FRAGMENT_TILE, KVLayout

from .mma import WARP, load_shared, u32

#: Binary exponent of the unit of a denormal half.
UNIT_EXPONENT = -24
#: Pairs of a tile in a lane, and of what is packed together.
TILE_PAIRS, CHUNK_PAIRS = 4, 16


@dataclass(frozen=True)
class Codes:
    """One component, K or V, of the pages of a layout; ``bits`` is 16 where it is not quantized."""

    bits: int
    page: int
    dim: int

    @staticmethod
    def of(bits: int | None, layout: KVLayout) -> Codes:
        """The component of ``layout`` whose codes have ``bits``."""
        return Codes(bits or 16, layout.page_size, layout.head_dim)

    @property
    def odd_offset(self) -> int:
        """Bit offset at which odd pairs are read; their codes come out ``2**odd_offset`` too large."""
        return self.bits if self.bits < 8 else 0

    @property
    def vector(self) -> int:
        """Words of a lane that lie together."""
        return gcd(self.page * self.dim * self.bits // (32 * WARP), 4)

    def tiles(self, tokens: int) -> int:
        """Tiles of ``tokens`` tokens."""
        return tokens // FRAGMENT_TILE * (self.dim // FRAGMENT_TILE)

    def bytes(self, tokens: int) -> int:
        """Bytes of ``tokens`` tokens."""
        return tokens * self.dim * self.bits // 8

    def divides_at(self, tokens: int) -> bool:
        """Whether ``tokens`` tokens can be loaded on their own."""
        words = self.bytes(tokens) // (4 * WARP)
        whole = self.bits == 16 or self.tiles(tokens) * TILE_PAIRS % CHUNK_PAIRS == 0
        return whole and words % self.vector == 0

    def pair(self, words, tile: int, pair: int):
        """Register of pair ``pair`` of a tile, from the lane's words."""
        bits = self.bits
        if bits == 16:
            return words[tile * TILE_PAIRS + pair]
        chunk, n = divmod(tile * TILE_PAIRS + pair, CHUNK_PAIRS)
        fields, first = 16 // bits, chunk * bits
        offset = self.odd_offset if n % 2 else 0
        if n < fields * bits:
            return _field(words[first + n // fields], n % fields * bits, offset, 2**bits - 1)
        parts = [_field(words[first + w], n, offset + w, 1) for w in range(bits)]
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
        self.words = T.alloc_local([codes.bytes(tokens) // (4 * WARP)], "uint32")
        self.loaded: set[int] = set()

    def need(self, tiles: range) -> None:
        """Load what the tiles lie in."""
        bits, vector = self.codes.bits, self.codes.vector
        per_chunk = CHUNK_PAIRS // TILE_PAIRS
        for chunk in range(tiles.start // per_chunk, (tiles.stop - 1) // per_chunk + 1):
            low, high = chunk * bits, (chunk + 1) * bits
            if bits == 16:
                low, high = max(low, tiles.start * TILE_PAIRS), min(high, tiles.stop * TILE_PAIRS)
            for index in range(low // vector, (high - 1) // vector + 1):
                if index not in self.loaded:
                    self.loaded.add(index)
                    at = self.offset + index * WARP * vector * 4
                    load_shared(self.words, index * vector, vector, self.address, at)

    def pairs(self, tile: int) -> list:
        """The four registers of a tile, by pair."""
        return [self.codes.pair(self.words, tile, pair) for pair in range(TILE_PAIRS)]
