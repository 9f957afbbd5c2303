"""The queries of a decode block: operand B, as they are and, once a page, times the page's key scales.

Rows that are not sealed and the minimums of keys want queries in the order of channels: they stand in shared
memory, once for the block. Key codes want them in the order in which the page stores its channels, scaled:
each lane holds some pairs of channels of every head in registers, scales them, and puts them where the page's
codes have them. No table of places is kept, and no register is indexed.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T

from kvq.layout import FRAGMENT_TILE, KVLayout
from kvq.schedules.statements import put

from .fragments import Codes
from .key_pairs import KeyPairs
from .mma import (
    LOG2E,
    WARP,
    block_sync,
    half2,
    load_global,
    load_shared,
    mul_half2,
    store_shared,
    u32,
    warp_sync,
)


@dataclass(frozen=True)
class QueryPlace:
    """Shared memory of a block's queries.

    Attributes
    ----------
    layout : KVLayout
    heads : int
        Query heads of a block, at most 8.
    warps : int
    """

    layout: KVLayout
    heads: int
    warps: int

    @property
    def columns(self) -> int:
        """Heads that are stored: columns of B, the others repeat them."""
        return 4 if self.heads <= 4 else 8

    @property
    def plain_bytes(self) -> int:
        """Bytes of the queries as they are."""
        return self.layout.head_dim * self.columns * 2

    @property
    def shared_bytes(self) -> int:
        """Bytes of all: each warp has scaled queries of its own."""
        return self.plain_bytes * (1 + (self.warps if self.layout.k_bits else 0))

    @property
    def limit(self) -> float:
        """Largest query (times the softmax scale, in log2) whose product with a key scale is a half."""
        return 2.0 ** (14 - Codes.keys(self.layout).largest_offset)


class DecodeQuery:
    """Statements for one warp.

    Parameters
    ----------
    place : QueryPlace
    scale_at, v_scale_at : int
        As of :class:`~.key_pairs.KeyPairs`.
    address : expression
        Where the block's queries stand in shared memory, uint32.
    warp, lane : expression
        int32.
    """

    def __init__(self, place: QueryPlace, scale_at: int, v_scale_at: int, address, warp, lane) -> None:
        self.place, self.warp, self.lane = place, warp, lane
        self.dim, self.columns = place.layout.head_dim, place.columns
        self.steps = self.dim // FRAGMENT_TILE
        self.g, self.c = T.bind(T.shift_right(lane, 2)), T.bind(T.bitwise_and(lane, 3))
        column = T.bitwise_and(self.g, self.columns - 1)
        self.plain_at = T.bind(address + T.cast((column * 4 + self.c) * 8, "uint32"))
        self.words = T.alloc_local([2 * self.steps], "uint32")
        if place.layout.k_bits:
            own = address + T.cast(place.plain_bytes * (warp + 1), "uint32")
            self.pairs = KeyPairs(place.layout, scale_at, v_scale_at, lane)
            self.scaled_at = T.bind(own + T.cast((self.c * self.columns + column) * 4, "uint32"))
            # lanes of either parity start with another half of the heads: stores fall into more banks
            self.swap = T.bind(T.bitwise_and(lane, 1) * 4) if self.columns == 8 else 0
            self.store_at = T.bind(own + T.cast(self.swap * 4, "uint32"))
            self.owned = T.alloc_local([self.columns * self.pairs.per_lane], "uint32")

    def _halves(self, dst, at: int, low, high) -> None:
        limit = T.float32(self.place.limit)
        clipped = [T.max(T.min(x * T.float32(LOG2E), limit), T.float32(0) - limit) for x in (low, high)]
        half2(dst, at, *clipped)

    def load(self, q, task) -> None:
        """Read the block's queries; zero beyond its heads. All warps of the block take part.

        Everything is asked for before anything is waited for.
        """
        share = -(-self.steps // self.place.warps)
        steps = [T.bind(self.warp + i * self.place.warps) for i in range(share)]
        plain = T.alloc_local([4 * share], "float32")
        for i, t in enumerate(steps):
            for j in range(4):
                put(plain, T.float32(0), 4 * i + j)
            own = T.And(self.g < self.columns, T.And(self.g < self.place.heads, self.g < task.heads))
            with T.If(T.And(t < self.steps, own)), T.Then():
                source = q.ptr_to([task.row, task.first_head + self.g, self.c * (self.dim // 4) + 4 * t])
                load_global(plain, 4 * i, 4, source, 0, "f32")
        coded = self.place.layout.k_bits is not None
        values = self._load_owned(q, task) if coded else None
        packed = T.alloc_local([2], "uint32")
        for i, t in enumerate(steps):
            with T.If(T.And(t < self.steps, self.g < self.columns)), T.Then():
                for j in range(2):
                    self._halves(packed, j, plain[4 * i + 2 * j], plain[4 * i + 2 * j + 1])
                address = T.bind(self.plain_at + T.cast(t * self.columns * 32, "uint32"))
                store_shared(address, 0, [packed[0], packed[1]], "u32")
        if coded:
            n = self.pairs.per_lane
            for i in range(self.columns):
                for j in range(n):
                    at = 2 * n * i + j
                    self._halves(self.owned, n * i + j, values[at], values[at + n])
        block_sync()

    def _load_owned(self, q, task):
        """The lane's pairs of every head: first channels, then second ones, head after head."""
        n = self.pairs.per_lane
        values = T.alloc_local([2 * n * self.columns], "float32")
        for i in range(2 * n * self.columns):
            put(values, T.float32(0), i)
        for i in range(self.columns):
            if self.columns == 4 and i >= self.place.heads:
                continue
            head = T.bitwise_xor(self.swap, i) if self.columns == 8 else T.int32(i)
            with T.If(head < task.heads), T.Then():
                for part in range(2):
                    first = self.pairs.lane * n + part * (self.dim // 2)
                    source = q.ptr_to([task.row, task.first_head + head, first])
                    load_global(values, (2 * i + part) * n, n, source, 0, "f32")
        return values

    def plain(self, t: int) -> tuple:
        """Operand B of channels ``c D/4 + 4 t + 2 y + h``: queries as they are."""
        words = T.alloc_local([2], "uint32")
        load_shared(words, 0, 2, self.plain_at, t * self.columns * 32)
        return words[0], words[1]

    def scale(self, stage):
        """Bring the queries into the order and scale of the page at ``stage``; gives the factor of scores."""
        n, count = self.pairs.per_lane, self.columns
        header = self.pairs.load(stage)
        base, places = self.pairs.places(header)
        scales = self.pairs.scales(header, places)
        held = T.alloc_local([count], "uint32")

        def store() -> None:
            for j, (place, _) in enumerate(places):
                address = T.bind(self.store_at + place * u32(count * 4))
                other = T.bind(T.bitwise_xor(address, u32(16))) if count == 8 else None
                for i in range(count):
                    mul_half2(held, i, self.owned[n * i + j], scales[j])
                store_shared(address, 0, [held[i] for i in range(4)], "u32")
                if other is not None:
                    store_shared(other, 0, [held[i] for i in range(4, 8)], "u32")

        if self.pairs.lanes < WARP:
            with T.If(self.pairs.inside), T.Then():
                store()
        else:
            store()
        warp_sync()
        for i in range(2 * self.steps):
            load_shared(self.words, i, 1, self.scaled_at, i * 16 * count)
        return self.pairs.key_factor(base)

    def scaled(self, t: int) -> tuple:
        """Operand B of stored channels ``16 t ..``, after :meth:`scale`."""
        return self.words[2 * t], self.words[2 * t + 1]
