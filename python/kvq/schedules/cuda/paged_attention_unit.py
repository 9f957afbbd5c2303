"""Attention of one warp to one unit: codes straight into ``mma``.

::

    S^T[tokens, heads] = K[tokens, D] Q^T       A = key codes, B = queries times the keys' scales
    P = exp2(S - m)                             m grows only when it must
    O^T[D, heads] += V^T[D, tokens] P^T         A = value codes, B = P times the values' scales, transposed

Scales never touch the codes: the keys' go into the query once a page (``decode_query.py``), the page's base
multiplies the score, and query times minimum is one more product a page that starts the score. The values'
zero point is one number a head. Rows that are not sealed are fp16, in tiles of 16.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.layout import FRAGMENT_TILE, KVLayout
from kvq.schedules.statements import put

from .decode_query import DecodeQuery
from .fragments import UNIT_EXPONENT, Codes, LaneWords, odd_offset
from .mma import any_lane, bytes_of, exp2, half2, load_global, load_shared, mma, shuffle_xor, transpose, u32

#: The running maximum grows when a score exceeds it by more than this (in log2), by the bits of a value code.
#: Weights stay below 2 to its power, so that even the largest value scale times a weight is an fp16 number.
LAZY = {2: 1.0, 3: 2.0}
LAZY_OTHERS = 3.0
#: Bytes of a unit that a warp copies at once, about: enough in flight, and a ring that lets two blocks share
#: an SM.
UNIT_BYTES = 9216


class UnitAttention:
    """The statements, with the geometry of a unit: a page, or as much of one as a warp copies at once."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout, self.dim, self.page = layout, layout.head_dim, layout.page_size
        self.k, self.v = Codes.keys(layout), Codes.values(layout)
        self.steps = self.dim // FRAGMENT_TILE
        sizes = [n for n in (64, 32, 16) if n <= self.page and self.k.divides_at(n) and self.v.divides_at(n)]
        self.unit = next((n for n in sizes if self.k.bytes(n) + self.v.bytes(n) <= UNIT_BYTES), sizes[-1])
        self.per_page = self.page // self.unit
        self.tiles = self.unit // FRAGMENT_TILE
        self._place()

    def _place(self) -> None:
        """Where the sections of a unit stand in a stage: bytes in shared memory, words in the page."""
        layout, unit = self.layout, self.unit
        k_bytes, v_bytes = self.k.bytes(unit), self.v.bytes(unit)
        key_end, value_end = (
            layout.v_offset - layout.k_scale_offset,
            layout.unit_words - layout.v_scale_offset,
        )
        self.scale_at = k_bytes
        self.min_at = self.scale_at + 4 * (layout.k_min_offset - layout.k_scale_offset)
        self.v_at = k_bytes + 4 * key_end
        self.v_scale_at = self.v_at + v_bytes
        self.stage_bytes = self.v_scale_at + 4 * value_end
        #: first word in the page, words from one unit of the page to the next, byte in the stage, bytes
        self.sections = [
            (0, k_bytes // 4, 0, k_bytes),
            (layout.k_scale_offset, 0, self.scale_at, 4 * key_end),
            (layout.v_offset, v_bytes // 4, self.v_at, v_bytes),
            (layout.v_scale_offset, 0, self.v_scale_at, 4 * value_end),
        ]
        if self.per_page == 1:
            self.sections = [(0, 0, 0, self.stage_bytes)]

    def factors(self) -> tuple[float, float, float]:
        """What sums of even and of odd channels are multiplied by, and the zero point."""
        if self.layout.v_bits is None:
            return 1.0, 1.0, 0.0
        return (
            2.0**-UNIT_EXPONENT,
            2.0 ** -(UNIT_EXPONENT + odd_offset(self.layout.v_bits)),
            2.0 ** (self.layout.v_bits - 1),
        )

    # ---- a unit --------------------------------------------------------------------------------
    def minimum_scores(self, stage, c, query):
        """Query times the minimums of the page: a score each for two heads, the same in every row."""
        words = self.dim // 8
        minimum = T.alloc_local([words], "uint32")
        width = next(n for n in (4, 2, 1) if words % n == 0)
        address = T.bind(stage + T.cast(c * (self.dim // 2), "uint32"))
        for i in range(0, words, width):
            load_shared(minimum, i, width, address, self.min_at + 4 * i)
        chains = T.alloc_local([8], "float32")
        for t in range(self.steps):
            low, high = minimum[2 * t], minimum[2 * t + 1]
            mma(chains, 4 * (t % 2), (low, low, high, high), query.plain(t), fresh=t < 2)
        return [T.bind(chains[y] + chains[4 + y]) for y in range(2)]

    def scores(self, stage, lane, c, query: DecodeQuery):
        """Scores of the unit: products ``[4 tiles]``, what they are multiplied by, and what they start at."""
        products = T.alloc_local([4 * self.tiles], "float32")
        words = LaneWords(self.k, self.unit, T.bind(stage + T.cast(lane * (4 * self.k.vector), "uint32")), 0)
        tiles = [(tile, t) for tile in range(self.tiles) for t in range(self.steps)]
        words.need(tiles)
        quantized = self.layout.k_bits is not None
        factor = query.scale(stage) if quantized else None
        for t in range(self.steps):
            b = query.scaled(t) if quantized else query.plain(t)
            for tile in range(self.tiles):
                p = words.pairs(tile, t)
                mma(products, 4 * tile, (p[0], p[2], p[1], p[3]), b, fresh=t == 0)
        return products, factor, self.minimum_scores(stage, c, query) if quantized else None

    def softmax(self, products, factor, start, scales, tiles: int, state):
        """Weights of the tokens times their scales, as operand B: two words a tile."""
        out, zero, peak, total = state

        def scaled(x, add):
            return x * factor + add if factor is not None else x + add

        most = T.alloc_local([2], "float32")
        for y in range(2):
            best = products[y]
            for i in range(1, 2 * tiles):
                best = T.max(best, products[2 * i + y])
            put(most, scaled(best, start[y] if start else T.float32(0)), y)
        lazy = LAZY.get(self.layout.v_bits, LAZY_OTHERS)
        grown = [most[y] > peak[y] + T.float32(lazy) for y in range(2)]
        with T.If(any_lane(T.Or(*grown))), T.Then():
            for y in range(2):
                for mask in (4, 8, 16):
                    put(most, T.max(most[y], shuffle_xor(most[y], mask)), y)
                put(most, T.max(most[y], peak[y]), y)
            fade = T.alloc_local([2], "float32")
            for y in range(2):
                exp2(fade, y, peak[y] - most[y])
                put(peak, most[y], y)
                put(total, total[y] * fade[y], y)
                put(zero, zero[y] * fade[y], y)
            for i in range(4 * self.steps):
                put(out, out[i] * fade[i % 2], i)
        shift = [T.bind((start[y] if start else T.float32(0)) - peak[y]) for y in range(2)]
        weight = T.alloc_local([2], "float32")
        packed = T.alloc_local([1], "uint32")
        weights = T.alloc_local([2 * tiles], "uint32")
        for i in range(2 * tiles):
            for y in range(2):
                exp2(weight, y, scaled(products[2 * i + y], shift[y]))
                put(total, total[y] + weight[y], y)
            low, high = (weight[y] if scales is None else weight[y] * scales[i] for y in range(2))
            half2(packed, 0, low, high)
            transpose(weights, i, packed[0])
        return weights

    def value_scales(self, stage, g, part):
        """Scales of the lane's tokens in the unit, float32."""
        words = self.tiles
        held = T.alloc_local([words], "uint32")
        at = g * (self.page // FRAGMENT_TILE) + (part * words if self.per_page > 1 else 0)
        load_shared(held, 0, words, T.bind(stage + T.cast(at * 4, "uint32")), self.v_scale_at)
        halves = held.view("float16")
        return [T.bind(T.cast(halves[i], "float32")) for i in range(2 * words)]

    def attend(self, stage, part, lane, query, state) -> None:
        """Add the unit in ``stage`` to the warp's state."""
        g, c = T.bind(T.shift_right(lane, 2)), T.bind(T.bitwise_and(lane, 3))
        out, zero = state[0], state[1]
        quantized = self.layout.v_bits is not None
        products, factor, start = self.scores(stage, lane, c, query)
        scales = self.value_scales(stage, g, part) if quantized else None
        weights = self.softmax(products, factor, start, scales, self.tiles, state)
        address = T.bind(stage + T.cast(lane * (4 * self.v.vector), "uint32"))
        words = LaneWords(self.v, self.unit, address, self.v_at)
        one = u32(0x3C003C00)
        for tile in range(self.tiles):
            words.need((tile, t) for t in range(self.steps))
            b = (weights[2 * tile], weights[2 * tile + 1])
            if quantized:
                mma(zero, 0, (one, one, one, one), b)
            for t in range(self.steps):
                mma(out, 4 * t, words.pairs(tile, t), b)

    # ---- rows that are not sealed --------------------------------------------------------------
    def attend_rows(self, kv_open, task, tile, lane, query, state) -> None:
        """Add a tile of 16 rows of the own page, those that the query sees."""
        out = state[0]
        g, c = T.bind(T.shift_right(lane, 2)), T.bind(T.bitwise_and(lane, 3))
        first = T.bind(tile * FRAGMENT_TILE)
        key_words, value_words = self.dim // 8, self.dim // 16
        keys = T.alloc_local([2 * key_words], "uint32")
        values = T.alloc_local([4 * value_words], "uint32")

        def load(dst, at, words, token, kind, channel) -> None:
            width = next(n for n in (4, 2, 1) if words % n == 0)
            for i in range(words):
                put(dst, u32(0), at + i)
            with T.If(token < task.own_rows), T.Then():
                row = token * self.dim + channel
                source = T.bind(kv_open.ptr_to([task.row_page, task.layer, task.head, kind, row]))
                for i in range(0, words, width):
                    load_global(dst, at + i, width, source, 4 * i)

        for x in range(2):
            load(keys, x * key_words, key_words, first + g + 8 * x, 0, c * (self.dim // 4))
        for x in range(2):
            for h in range(2):
                token = first + 2 * c + h + 8 * x
                load(values, (2 * x + h) * value_words, value_words, token, 1, g * (self.dim // 8))
        products = T.alloc_local([4], "float32")
        for t in range(self.steps):
            a = [keys[x * key_words + 2 * t + y] for y in range(2) for x in range(2)]
            mma(products, 0, a, query.plain(t), fresh=t == 0)
        for x in range(2):
            seen = first + g + 8 * x < task.own_rows
            for y in range(2):
                put(products, T.Select(seen, products[2 * x + y], T.float32("-inf")), 2 * x + y)
        weights = self.softmax(products, None, None, None, 1, state)
        a = T.alloc_local([4], "uint32")
        for t in range(self.steps):
            for x in range(2):
                low, high = (values[(2 * x + h) * value_words + t] for h in range(2))
                bytes_of(a, 2 * x, low, high, 0x5410)
                bytes_of(a, 2 * x + 1, low, high, 0x7632)
            mma(out, 4 * t, [a[i] for i in range(4)], (weights[0], weights[1]))
