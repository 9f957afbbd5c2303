"""paged_attention for prefill, on tensor cores: a tile of rows of one page a task.

A block has the rows of one attention task times the query heads of one KV head, 16 of them a warp. Its warps
go through the sealed pages together, in a ring of shared memory that ``cp.async`` fills a few pages ahead::

    S[rows, tokens] = Q K^T         A = queries times the page's key scales, B = key codes
    P = exp2(S - m)                 m grows only when it must
    O[rows, D] += P V               A = P times the values' scales, B = value codes

Codes go straight from the page into ``mma``, as in decode (``paged_attention_unit.py``): what is an operand A
there, 16 tokens at a time, is operand B here, twice 8 tokens. Scores come out where the product with the
values wants its weights. The rows' own page goes first, in tiles of 16 fp16 rows. A row's sums do not depend
on what shares its tile.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from kvq.layout import FRAGMENT_TILE, KVLayout
from kvq.schedules.backend import AttentionShape

from .block import ATTRIBUTES, for_threads
from .fragments import UNIT_EXPONENT, Codes, LaneWords, odd_offset
from .key_pairs import KeyPairs
from .kv_append import WarpRow
from .mma import (
    WARP,
    any_lane,
    block_sync,
    bytes_of,
    copies_commit,
    copies_wait,
    copy_async,
    exp2,
    half2,
    load_global,
    load_shared,
    mma,
    put,
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
#: Floats of a scratch slot beyond the head_dim.
SCRATCH_EXTRA = 8


def attention_shape(layout: KVLayout, num_heads: int) -> AttentionShape:
    """How the plan must cut attention for :func:`prefill_attention`: rows stay whole."""
    group = num_heads // layout.num_kv_heads
    return AttentionShape(4, max(1, min(layout.page_size, ROWS // group)), 1, SCRATCH_EXTRA)


class _Place:
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


class _Warp:
    """The statements of a warp, with the kernel's static geometry at hand."""

    def __init__(self, layout: KVLayout, base, warp, lane) -> None:
        self.layout, self.dim, self.page = layout, layout.head_dim, layout.page_size
        self.place, self.base, self.warp, self.lane = _Place(layout), base, warp, lane
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
                put(most, T.max(most[y], self.peak[y]), y)
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

    def attend(self, stage, which) -> None:
        """Add the page at ``stage``."""
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
            scales = self._value_scales(stage, first, tiles) if layout.v_bits is not None else None
            words = self.softmax(products, factor, start, scales, tiles)
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
    def attend_own(self, source, last, seen) -> None:
        """Add the own page: ``source(part, index)`` points to it, row g + 8 y sees ``seen[y]`` rows of it."""
        with T.serial(T.truncdiv(last + (FRAGMENT_TILE - 1), FRAGMENT_TILE)) as tile:
            self._attend_rows(source, T.bind(tile * FRAGMENT_TILE), last, seen)
        if self.layout.v_bits is not None:
            even, odd = self._factors()
            for i in range(8 * self.steps):
                put(self.out, self.out[i] * T.float32(1 / (odd if i % 8 >= 4 else even)), i)

    def _attend_rows(self, source, first, last, seen) -> None:
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
        for x in range(2):
            for y in range(2):
                for h in range(2):
                    i = 4 * x + 2 * y + h
                    inside = first + 2 * self.c + h + 8 * x < seen[y]
                    put(products, T.Select(inside, products[i], T.float32("-inf")), i)
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

    def finish(self, write) -> None:
        """Divide by the sums, undo the rotation of V; ``write(row of the warp, line)`` stores a row."""
        dim, bits = self.dim, self.layout.v_bits
        for y in range(2):
            for mask in (1, 2):
                put(self.total, self.total[y] + shuffle_xor(self.total[y], mask), y)
        even, odd = self._factors() if bits else (1.0, 1.0)
        stride = 2 * row_bytes(self.layout)  # eight rows of floats in the place of 16 rows of queries
        width = next(n for n in (4, 2, 1) if dim // 8 % n == 0)
        held = T.alloc_local([dim // 8], "float32")
        for y in range(2):
            inverse = T.bind(T.float32(1) / self.total[y])
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


def prefill_attention(layout: KVLayout, num_heads: int, dtype: str) -> tirx.PrimFunc:
    """Build the kernel; ``layout`` is in the order ``fragments``, its rows in float16.

    Arguments of the kernel: q ``float32[n, Hq, D]`` (rotated, scaled), kv_pool, kv_workspace, positions,
    page_table, plan_counts, attention_tasks, merge_tasks, layer, then kv_open and attention_scratch (passed
    through), and out ``dtype[n, Hq, D]``. One block for each entry of the list of tasks and KV head; those
    beyond the count have nothing to do.
    """
    kv_heads, layers, dim, page = (
        layout.num_kv_heads,
        layout.num_layers,
        layout.head_dim,
        layout.page_size,
    )
    unit, threads, group = layout.values_per_unit, WARPS * WARP, num_heads // layout.num_kv_heads
    place = _Place(layout)

    def task(at, head, thread, shared, args):
        q, pool, kv_open, kv_workspace, num_open, positions, table, tasks, layer, out = args
        lane, warp = T.bind(T.bitwise_and(thread, WARP - 1)), T.bind(T.shift_right(thread, 5))
        base = T.bind(T.cuda.cvta_generic_to_shared(shared.data))
        first_row, table_start = T.bind(tasks[at, 0]), T.bind(tasks[at, 2])
        num_rows = T.bind(tasks[at, 1] - first_row)
        own = T.bind(T.cast(tasks[at, 3], "int64"))
        sealed = T.bind(T.shift_right(positions[first_row], page.bit_length() - 1))

        def locate(row):
            local = T.bind(T.truncdiv(row, group))
            return local < num_rows, first_row + local, head * group + T.truncmod(row, group)

        def seen(row):
            local = T.min(T.truncdiv(row, group), num_rows - 1)
            return T.bitwise_and(positions[first_row + local], page - 1) + 1

        entry = T.alloc_local([1], "int32")

        def next_entry(index) -> None:
            put(entry, table[table_start + T.max(T.min(index, sealed - 1), 0)], 0)

        def copy(stage) -> None:
            source = T.bind(T.cast(entry[0], "int64"))
            words = layout.unit_words

            def vector(i):
                target = T.bind(base + T.cast(stage * place.page_bytes + i * 16, "uint32"))
                copy_async(target, 0, pool.ptr_to([source, layer, head, i * 4]), 0)

            for_threads(words // 4, thread, threads, vector)

        for s in range(place.stages - 1):
            with T.If(s < sealed), T.Then():
                next_entry(s)
                copy(s)
            copies_commit()
        next_entry(place.stages - 1)
        PrefillQuery.load(layout, base + u32(place.query_at), q, ROWS, thread, threads, locate)
        body = _Warp(layout, base, warp, lane)
        body.clear()
        block_sync()

        def own_rows(rows, start):
            body.attend_own(lambda part, i: rows.ptr_to([*start, part, i]), T.bind(seen(ROWS - 1)), own_seen)

        own_seen = [T.bind(seen(warp * FRAGMENT_TILE + body.g + 8 * y)) for y in range(2)]
        with T.If(own < num_open):
            with T.Then():
                own_rows(kv_open, (own, layer, head))
            with T.Else():
                own_rows(kv_workspace, (own - num_open, head))
        if layout.k_bits:
            copies_wait(place.stages - 2)
            block_sync()
            with T.If(T.And(warp == 0, sealed > 0)), T.Then():
                body.write_table(base, T.int32(0))
        with T.serial(sealed) as index:
            copies_wait(place.stages - (3 if layout.k_bits else 2))
            block_sync()
            following = T.bind(index + (place.stages - 1))
            with T.If(following < sealed), T.Then():
                copy(T.truncmod(following, place.stages))
                next_entry(following + 1)
            copies_commit()
            if layout.k_bits:
                later = T.bind(index + 1)
                with T.If(T.And(T.bitwise_and(later, WARPS - 1) == warp, later < sealed)), T.Then():
                    at_stage = T.truncmod(later, place.stages) * place.page_bytes
                    body.write_table(T.bind(base + T.cast(at_stage, "uint32")), T.bitwise_and(later, 1))
            here = T.bind(base + T.cast(T.truncmod(index, place.stages) * place.page_bytes, "uint32"))
            body.attend(here, T.bitwise_and(index, 1))

        def write(r, line):
            valid, row, which = locate(warp * FRAGMENT_TILE + r)
            with T.If(valid), T.Then():
                line.each(lambda e, channel: put(out, T.cast(line.x[e], dtype), row, which, channel))

        body.finish(write)

    @T.prim_func(private=True)
    def prefill_attention(
        q_h: T.handle,
        pool_h: T.handle,
        workspace_h: T.handle,
        positions_h: T.handle,
        table_h: T.handle,
        counts: T.Buffer((4,), "int32"),
        tasks_h: T.handle,
        merges_h: T.handle,
        layer: T.int64,
        open_h: T.handle,
        scratch_h: T.handle,
        out_h: T.handle,
    ):
        T.func_attr(ATTRIBUTES)
        n = T.int64()
        num_pages = T.int64()
        num_open = T.int64()
        num_workspace = T.int64()
        table_size = T.int64()
        num_tasks = T.int64()
        num_merges = T.int64()
        num_slots = T.int64()
        q = T.match_buffer(q_h, (n, num_heads, dim), "float32")
        pool = T.match_buffer(pool_h, (num_pages, layers, kv_heads, layout.unit_words), "uint32")
        kv_open = T.match_buffer(open_h, (num_open, layers, kv_heads, 2, unit), "float16")
        kv_workspace = T.match_buffer(workspace_h, (num_workspace, kv_heads, 2, unit), "float16")
        positions = T.match_buffer(positions_h, (n,), "int32")
        table = T.match_buffer(table_h, (table_size,), "int32")
        tasks = T.match_buffer(tasks_h, (num_tasks, 7), "int32")
        T.match_buffer(merges_h, (num_merges, 3), "int32")
        T.match_buffer(scratch_h, (num_slots, num_heads, dim + SCRATCH_EXTRA), "float32")
        out = T.match_buffer(out_h, (n, num_heads, dim), dtype)
        T.device_entry()
        head, at = T.cta_id([kv_heads, T.cast(num_tasks, "int32")])
        thread = T.thread_id([threads])
        shared = T.alloc_buffer((place.shared_bytes,), "uint8", scope="shared.dyn", align=128)
        T.attr({"tirx.dyn_smem_bytes": place.shared_bytes})
        if at < counts[2]:
            task(
                at,
                head,
                thread,
                shared,
                (q, pool, kv_open, kv_workspace, num_open, positions, table, tasks, layer, out),
            )

    return prefill_attention
