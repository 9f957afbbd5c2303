"""The queries of a prefill block: operand A, in the order of a page's key codes and scaled.

Rows stand in shared memory as halves, one word for each RoPE pair of channels, where keys have codes; each
page comes with a table that says, place by place, which pair the page stores there, its scales and its
minimums. Where keys are rows, words hold neighbouring channels in the order of operand B.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.layout import FRAGMENT_TILE, KVLayout
from kvq.schedules.statements import for_threads

from .fragments import Codes
from .key_pairs import KeyPairs
from .mma import LOG2E, WARP, bytes_of, half2, load_shared, mma, mul_half2, store_shared, u32

#: Words after each row: rows of a tile start in different banks.
_PAD = 4
#: Bytes of an entry of a page's table: place of the pair in a row, scales, minimums.
ENTRY_BYTES = 16


def row_bytes(layout: KVLayout) -> int:
    """Bytes of a row of queries in shared memory."""
    return 4 * (layout.head_dim // 2 + _PAD)


def table_bytes(layout: KVLayout) -> int:
    """Bytes of a page's table."""
    return layout.head_dim // 2 * ENTRY_BYTES if layout.k_bits else 0


class PrefillQuery:
    """Statements for one warp, whose 16 rows start at ``rows_at`` in shared memory (uint32)."""

    def __init__(self, layout: KVLayout, rows_at, lane) -> None:
        self.layout, self.rows_at, self.lane = layout, rows_at, lane
        self.dim, self.half = layout.head_dim, layout.head_dim // 2
        self.steps = self.dim // FRAGMENT_TILE
        self.coded = layout.k_bits is not None
        g, self.c = T.bind(T.shift_right(lane, 2)), T.bind(T.bitwise_and(lane, 3))
        self.row_at = T.bind(rows_at + T.cast(g * row_bytes(layout), "uint32"))
        self.limit = 2.0 ** (14 - Codes.keys(layout).largest_offset)
        # of rows of pairs, channels c D/4 + .. are low halves where c < 2, and high ones elsewhere
        self.selector = T.bind(T.Select(self.c < 2, u32(0x5410), u32(0x7632)))

    @staticmethod
    def load(layout: KVLayout, base, q, rows: int, thread, threads: int, locate) -> None:
        """Fill the block's rows; ``locate(row)`` gives (valid, row of ``q``, head)."""
        half, dim = layout.head_dim // 2, layout.head_dim
        limit = T.float32(2.0 ** (14 - Codes.keys(layout).largest_offset))
        packed = T.alloc_local([1], "uint32")

        def word(i):
            row, at = T.bind(T.truncdiv(i, half)), T.bind(T.truncmod(i, half))
            valid, source, head = locate(row)
            if layout.k_bits:
                channels = (at, at + half)
            else:  # step, y, c
                first = T.bitwise_and(at, 3) * (dim // 4) + T.shift_right(at, 2) * 2
                channels = (first, first + 1)
            pair = [
                T.if_then_else(valid, q[source, head, d] * T.float32(LOG2E), T.float32(0)) for d in channels
            ]
            half2(packed, 0, *(T.max(T.min(x, limit), T.float32(0) - limit) for x in pair))
            address = base + T.cast(row * row_bytes(layout) + at * 4, "uint32")
            store_shared(T.bind(address), 0, [packed[0]], "u32")

        for_threads(rows * half, thread, threads, word)

    # ---- a page's table ------------------------------------------------------------------------
    def write_table(self, pairs: KeyPairs, stage, min_at: int, table, base_at) -> None:
        """One warp writes the table of the page at ``stage``, and its factor of scores to ``base_at``."""
        n = pairs.per_lane
        header = pairs.load(stage)
        base, places = pairs.places(header)
        scales = pairs.scales(header, places)
        minimum, held = T.alloc_local([2 * max(1, n // 2)], "uint32"), T.alloc_local([1], "uint32")
        words = max(1, n // 2)
        address = T.bind(stage + pairs.bytes_before * u32(2))
        for part in range(2):
            kind = "u16" if n == 1 else "u32"
            load_shared(minimum, part * words, words, address, min_at + part * self.dim, kind)

        def store() -> None:
            for j, (place, _) in enumerate(places):
                low, high = (minimum[part * words + j // 2] for part in range(2))
                bytes_of(held, 0, low, high, 0x7632 if j % 2 else 0x5410)
                offset = (pairs.bytes_before + u32(j)) * u32(4)
                entry = T.bind(table + place * u32(ENTRY_BYTES))
                store_shared(entry, 0, [offset, scales[j], held[0], u32(0)], "u32")

        if pairs.lanes < WARP:
            with T.If(pairs.inside), T.Then():
                store()
        else:
            store()
        with T.If(self.lane == 0), T.Then():
            store_shared(base_at, 0, [pairs.key_factor(base)])

    # ---- operand A -----------------------------------------------------------------------------
    def scaled(self, table, t: int, start):
        """Operand A of stored channels ``16 t ..``; adds query times minimum to ``start``."""
        entries, raw = T.alloc_local([8], "uint32"), T.alloc_local([4], "uint32")
        address = T.bind(table + T.cast(self.c * ENTRY_BYTES, "uint32"))
        for y in range(2):
            load_shared(entries, 4 * y, 4, address, (8 * t + 4 * y) * ENTRY_BYTES)
            at = T.bind(self.row_at + entries[4 * y])
            for x in range(2):
                load_shared(raw, 2 * y + x, 1, at, 8 * x * row_bytes(self.layout))
        mma(start, 0, [raw[i] for i in range(4)], (entries[2], entries[6]), fresh=t == 0)
        a = T.alloc_local([4], "uint32")
        for i in range(4):
            mul_half2(a, i, raw[i], entries[4 * (i // 2) + 1])
        return [a[i] for i in range(4)]

    def plain(self, t: int):
        """Operand A of channels ``c D/4 + 4 t + 2 y + h``."""
        a = T.alloc_local([4], "uint32")
        rows = [8 * x * row_bytes(self.layout) for x in range(2)]
        if not self.coded:
            address = T.bind(self.row_at + T.cast(self.c * 4, "uint32"))
            for y in range(2):
                for x in range(2):
                    load_shared(a, 2 * y + x, 1, address, rows[x] + (2 * t + y) * 16)
            return [a[i] for i in range(4)]
        two = T.alloc_local([2], "uint32")
        first = T.truncmod(self.c * (self.dim // 4), self.half)
        address = T.bind(self.row_at + T.cast(first * 4, "uint32"))
        for y in range(2):
            for x in range(2):
                load_shared(two, 0, 2, address, rows[x] + (4 * t + 2 * y) * 4)
                bytes_of(a, 2 * y + x, two[0], two[1], self.selector)
        return [a[i] for i in range(4)]
