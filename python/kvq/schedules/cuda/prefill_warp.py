"""What a warp of ``prefill_attention`` does with a page: 16 rows of queries, codes straight into ``mma``.

A tile of codes that is operand A in decode (``paged_attention_unit.py``), 16 tokens at a time, is operand B
here, twice 8 tokens. Scores come out in the registers where the product with the values wants its weights.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.layout import FRAGMENT_TILE, KVLayout
from kvq.schedules.attention_variant import AttentionVariant
from kvq.schedules.statements import put

from .fragments import UNIT_EXPONENT, Codes, LaneWords, odd_offset
from .key_pairs import KeyPairs
from .kv_append import WarpRow
from .mma import (
    LOG2E,
    any_lane,
    bytes_of,
    exp2,
    half2,
    load_global,
    load_shared,
    mma,
    shuffle_xor,
    store_shared,
    u32,
    warp_sync,
)
from .paged_attention_unit import LAZY, LAZY_OTHERS
from .prefill_query import PrefillQuery, row_bytes, table_bytes

WARPS = 4
ROWS = WARPS * FRAGMENT_TILE
#: Tokens whose scores a warp holds at once.
HELD_TOKENS = 64
#: Shared memory of a block that still lets two share a multiprocessor of an A100 or an H100, and most of any
#: block.
_SHARED_GOAL, _SHARED_MOST = 80 * 1024, 160 * 1024


class Place:
    """Bytes of a block's shared memory: the ring, tables and factors of two pages, the queries."""

    def __init__(self, layout: KVLayout) -> None:
        self.page_bytes = 4 * layout.unit_words
        table, queries = table_bytes(layout), ROWS * row_bytes(layout)
        fewest = 3 if layout.k_bits else 2
        rest = 2 * table + 16 + queries
        goal = _SHARED_GOAL if fewest * self.page_bytes + rest <= _SHARED_GOAL else _SHARED_MOST
        self.stages = max(fewest, min(4, (goal - rest) // self.page_bytes))
        self.table_at = self.stages * self.page_bytes
        self.table_bytes = table
        self.factor_at = self.table_at + 2 * table
        self.query_at = self.factor_at + 16
        self.shared_bytes = self.query_at + queries
        #: blocks that must fit a multiprocessor, which limits registers
        self.blocks_per_sm = 3 if layout.head_dim <= 128 else 2


class PrefillWarp:
    """The statements of a warp, with the kernel's static geometry at hand."""

    def __init__(self, layout: KVLayout, variant: AttentionVariant, base, warp, lane) -> None:
        self.layout, self.dim, self.page = layout, layout.head_dim, layout.page_size
        self.variant = variant
        self.place, self.base, self.warp, self.lane = Place(layout), base, warp, lane
        self.steps = self.dim // FRAGMENT_TILE
        self.keys, self.values = Codes.keys(layout), Codes.values(layout)
        self.g, self.c = T.bind(T.shift_right(lane, 2)), T.bind(T.bitwise_and(lane, 3))
        self.rows_at = T.bind(
            base + T.cast(warp * (FRAGMENT_TILE * row_bytes(layout)) + self.place.query_at, "uint32")
        )
        self.query = PrefillQuery(layout, self.rows_at, lane)
        self.held = min(self.page, HELD_TOKENS)
        # sums of O, of zero points, the rows' maxima and sums: rows g and g + 8
        self.out = T.alloc_local([8 * self.steps], "float32")
        self.zero = T.alloc_local([4], "float32")
        self.peak, self.total = T.alloc_local([2], "float32"), T.alloc_local([2], "float32")
        if layout.k_bits:
            self.pairs = KeyPairs(layout, 4 * layout.k_scale_offset, 4 * layout.v_scale_offset, lane)

    def clear(self) -> None:
        for buffer, count, value in (
            (self.out, 8 * self.steps, 0.0),
            (self.zero, 4, 0.0),
            (self.peak, 2, float("-inf")),
            (self.total, 2, 0.0),
        ):
            for i in range(count):
                put(buffer, T.float32(value), i)

    def _capped(self, products, factor, start, count: int):
        """Products to soft-capped scores; returns what is then left to multiply and to add."""
        cap = self.variant.softcap
        if cap is None:
            return factor, start
        power, limit = T.alloc_local([1], "float32"), cap * LOG2E
        for i in range(count):
            score = products[i] if factor is None else products[i] * factor + start[i % 4 // 2 * 2]
            # tanh by one exponential: at most 2e-7 of the cap beside it
            exp2(power, 0, score * T.float32(2 / cap))
            put(products, T.float32(limit) - T.float32(2 * limit) / (power[0] + T.float32(1)), i)
        return None, None

    def _mask(self, products, count: int, seen) -> None:
        """Scores of what a row does not see to -inf; ``seen(i, y)`` tells of score ``i``, of row g + 8 y."""
        for i in range(count):
            put(products, T.Select(seen(i, i % 4 // 2), products[i], T.float32("-inf")), i)

    def softmax(self, products, factor, start, scales, tiles: int):
        """Weights of ``16 tiles`` tokens times their scales, as operand A: four words a tile."""

        def scaled(i: int, add):
            return products[i] * factor + add if factor is not None else products[i] + add

        most = T.alloc_local([2], "float32")
        zero = T.float32(0)
        for y in range(2):
            best = products[2 * y]
            for i in range(8 * tiles):
                if i % 4 // 2 == y and i != 2 * y:
                    best = T.max(best, products[i])
            best = best * factor if factor is not None else best
            put(most, best + (start[2 * y] if start is not None else zero), y)
        lazy = LAZY.get(self.layout.v_bits, LAZY_OTHERS)
        grown = [most[y] > self.peak[y] + T.float32(lazy) for y in range(2)]
        with T.If(any_lane(T.Or(*grown))), T.Then():
            fade = T.alloc_local([2], "float32")
            for y in range(2):
                for mask in (1, 2):
                    put(most, T.max(most[y], shuffle_xor(most[y], mask)), y)
                # a row decides by itself, whoever shares its warp: so it has the same bits in every tile
                own = most[y] > self.peak[y] + T.float32(lazy)
                put(most, T.Select(own, most[y], self.peak[y]), y)
                exp2(fade, y, self.peak[y] - most[y])
                put(self.peak, most[y], y)
                put(self.total, self.total[y] * fade[y], y)
            for buffer, count in ((self.out, 2 * self.steps), (self.zero, 1)):
                for i in range(4 * count):
                    put(buffer, buffer[i] * fade[i % 4 // 2], i)
        shift = [T.bind((start[2 * y] if start is not None else zero) - self.peak[y]) for y in range(2)]
        weight, words = T.alloc_local([2], "float32"), T.alloc_local([4 * tiles], "uint32")
        for tile in range(tiles):
            for x in range(2):
                for y in range(2):
                    for h in range(2):
                        exp2(weight, h, scaled(8 * tile + 4 * x + 2 * y + h, shift[y]))
                        put(self.total, self.total[y] + weight[h], y)
                    pair = [
                        weight[h] if scales is None else weight[h] * scales[h][2 * tile + x] for h in range(2)
                    ]
                    half2(words, 4 * tile + 2 * x + y, *pair)
        return words

    def add_values(self, words, tile: int, b) -> None:
        """Add the product of a tile's weights; ``b(t)`` are the four registers of its values, by pair."""
        a = [words[4 * tile + i] for i in range(4)]
        if self.layout.v_bits is not None:
            one = u32(0x3C003C00)
            mma(self.zero, 0, a, (one, one))
        for t in range(self.steps):
            p = b(t)
            for y in range(2):
                mma(self.out, 8 * t + 4 * y, a, (p[y], p[2 + y]))

    # ---- sealed pages --------------------------------------------------------------------------
    def write_table(self, stage, which) -> None:
        """Prepare the page at ``stage`` for all warps, in table ``which`` of two."""
        table, factor = self._table(which)
        self.query.write_table(self.pairs, stage, 4 * self.layout.k_min_offset, table, factor)

    def _table(self, which):
        which = T.cast(which, "uint32")
        table = self.base + u32(self.place.table_at) + which * u32(self.place.table_bytes)
        return T.bind(table), T.bind(self.base + u32(self.place.factor_at) + which * u32(4))

    def attend(self, stage, which, first_seen) -> None:
        """Add the page at ``stage``; in a window, row g + 8 y sees tokens from ``first_seen[y]`` on."""
        layout, quantized = self.layout, self.layout.k_bits is not None
        table, factor = None, None
        if quantized:
            table, factor_at = self._table(which)
            held = T.alloc_local([1], "float32")
            load_shared(held, 0, 1, factor_at, 0, "f32")
            factor = T.bind(held[0])
        address = [
            T.bind(stage + T.cast(self.lane * (4 * codes.vector), "uint32"))
            for codes in (self.keys, self.values)
        ]
        keys = LaneWords(self.keys, self.page, address[0], 0)
        values = LaneWords(self.values, self.page, address[1], 4 * layout.v_offset)
        tiles = self.held // FRAGMENT_TILE
        for first in range(0, self.page // FRAGMENT_TILE, tiles):
            products = T.alloc_local([8 * tiles], "float32")
            start = T.alloc_local([4], "float32") if quantized else None
            for t in range(self.steps):
                a = self.query.scaled(table, t, start) if quantized else self.query.plain(t)
                for tile in range(tiles):
                    keys.need([(first + tile, t)])
                    p = keys.pairs(first + tile, t)
                    for x in range(2):
                        mma(products, 8 * tile + 4 * x, a, (p[2 * x], p[2 * x + 1]), fresh=t == 0)
            left = self._capped(products, factor, start, 8 * tiles)
            if first_seen is not None:

                def seen(i, y, first=first):
                    token = (self.c * 2 + i % 2) * (self.page // 8) + 2 * (first + i // 8) + i % 8 // 4
                    return token >= first_seen[y]

                with T.If(any_lane(T.Or(first_seen[0] > 0, first_seen[1] > 0))), T.Then():
                    self._mask(products, 8 * tiles, seen)
            scales = self._value_scales(stage, first, tiles) if layout.v_bits is not None else None
            words = self.softmax(products, *left, scales, tiles)
            for tile in range(tiles):
                values.need((first + tile, t) for t in range(self.steps))
                self.add_values(words, tile, lambda t, row=first + tile: values.pairs(row, t))

    def _value_scales(self, stage, first: int, tiles: int):
        """Scales of the lane's tokens, float32: ``[h][2 tile + x]``."""
        held = T.alloc_local([2 * tiles], "uint32")
        for h in range(2):
            token = (self.c * 2 + h) * (self.page // 8) + 2 * first
            address = T.bind(stage + T.cast(token * 2, "uint32"))
            load_shared(held, h * tiles, tiles, address, 4 * self.layout.v_scale_offset)
        halves = held.view("float16")
        return [
            [T.bind(T.cast(halves[2 * tiles * h + i], "float32")) for i in range(2 * tiles)] for h in range(2)
        ]

    # ---- the own page --------------------------------------------------------------------------
    def attend_own(self, source, last, seen, first_seen) -> None:
        """Add the own page, ``source(part, index)``: row g + 8 y sees ``first_seen[y] .. seen[y] - 1``."""
        with T.serial(T.truncdiv(last + (FRAGMENT_TILE - 1), FRAGMENT_TILE)) as tile:
            self._attend_rows(source, T.bind(tile * FRAGMENT_TILE), last, seen, first_seen)
        if self.layout.v_bits is not None:
            even, odd = self._factors()
            for i in range(8 * self.steps):
                put(self.out, self.out[i] * T.float32(1 / (odd if i % 8 >= 4 else even)), i)

    def _attend_rows(self, source, first, last, seen, first_seen) -> None:
        key_words, value_words = self.dim // 8, self.dim // 16
        keys, values = T.alloc_local([2 * key_words], "uint32"), T.alloc_local([4 * value_words], "uint32")

        def load(dst, at: int, words: int, token, part: int, channel) -> None:
            width = next(n for n in (4, 2, 1) if words % n == 0)
            for i in range(words):
                put(dst, u32(0), at + i)
            with T.If(token < last), T.Then():
                pointer = T.bind(source(part, token * self.dim + channel))
                for i in range(0, words, width):
                    load_global(dst, at + i, width, pointer, 4 * i)

        for x in range(2):
            load(keys, x * key_words, key_words, first + self.g + 8 * x, 0, self.c * (self.dim // 4))
        for x in range(2):
            for h in range(2):
                token = first + 2 * self.c + h + 8 * x
                load(values, (2 * x + h) * value_words, value_words, token, 1, self.g * (self.dim // 8))
        products = T.alloc_local([8], "float32")
        for t in range(self.steps):
            a = self.query.plain(t)
            for x in range(2):
                b = (keys[x * key_words + 2 * t], keys[x * key_words + 2 * t + 1])
                mma(products, 4 * x, a, b, fresh=t == 0)
        self._capped(products, None, None, 8)

        def inside(i, y):
            token = first + 2 * self.c + i % 2 + i // 4 * 8
            below = token < seen[y]
            return below if first_seen is None else T.And(below, token >= first_seen[y])

        self._mask(products, 8, inside)
        words = self.softmax(products, None, None, None, 1)
        p = T.alloc_local([4], "uint32")

        def registers(t: int):
            for x in range(2):
                low, high = (values[(2 * x + h) * value_words + t] for h in range(2))
                bytes_of(p, 2 * x, low, high, 0x5410)
                bytes_of(p, 2 * x + 1, low, high, 0x7632)
            return [p[i] for i in range(4)]

        a = [words[i] for i in range(4)]
        for t in range(self.steps):
            b = registers(t)
            for y in range(2):
                mma(self.out, 8 * t + 4 * y, a, (b[y], b[2 + y]))

    # ---- the end -------------------------------------------------------------------------------
    def _factors(self) -> tuple[float, float]:
        """What sums of even and of odd channels are multiplied by, where values have codes."""
        bits = self.layout.v_bits
        return 2.0**-UNIT_EXPONENT, 2.0 ** -(UNIT_EXPONENT + odd_offset(bits))

    def _inverse(self, y: int, sinks):
        """What the sums of row g + 8 y are multiplied by."""
        if sinks is None:
            return T.float32(1) / self.total[y]
        sink, powers = T.bind(sinks[y] * T.float32(LOG2E)), T.alloc_local([2], "float32")
        most = T.bind(T.max(self.peak[y], sink))
        exp2(powers, 0, self.peak[y] - most)
        exp2(powers, 1, sink - most)
        return powers[0] / (self.total[y] * powers[0] + powers[1])

    def finish(self, write, sinks) -> None:
        """Divide by the sums, undo the rotation of V; ``write(row of the warp, line)`` stores a row.

        ``sinks`` are the logits of the sinks of rows g and g + 8, or None.
        """
        dim, bits = self.dim, self.layout.v_bits
        for y in range(2):
            for mask in (1, 2):
                put(self.total, self.total[y] + shuffle_xor(self.total[y], mask), y)
        even, odd = self._factors() if bits else (1.0, 1.0)
        stride = 2 * row_bytes(self.layout)  # eight rows of floats in the place of 16 rows of queries
        width = next(n for n in (4, 2, 1) if dim // 8 % n == 0)
        held = T.alloc_local([dim // 8], "float32")
        for y in range(2):
            inverse = T.bind(self._inverse(y, sinks))
            warp_sync()
            for h in range(2):
                for t in range(self.steps):
                    for odd_channel in range(2):
                        value = self.out[8 * t + 4 * odd_channel + 2 * y + h]
                        if bits:
                            point = T.float32(2.0 ** (bits - 1)) * self.zero[2 * y]
                            value = value * T.float32(odd if odd_channel else even) - point
                        put(held, value * inverse, 2 * t + odd_channel)
                channel = (self.c * 2 + h) * (dim // 8)
                address = T.bind(self.rows_at + T.cast(self.g * stride + channel * 4, "uint32"))
                for i in range(0, dim // 8, width):
                    store_shared(address, 4 * i, [held[i + j] for j in range(width)])
            warp_sync()
            with T.serial(8) as r:
                line, one = WarpRow(dim, self.lane), T.alloc_local([1], "float32")
                line.clear()

                def read(e, channel, r=r, one=one, line=line):
                    at = T.bind(self.rows_at + T.cast(r * stride + channel * 4, "uint32"))
                    load_shared(one, 0, 1, at, 0, "f32")
                    put(line.x, one[0], e)

                line.each(read)
                if bits is not None:
                    line.rotate_values()
                write(r + 8 * y, line)
