"""tile_attention: caches of float32 rows, which tensor cores would round; prefill and decode.

A block has one attention task of one KV head: up to ``M`` query rows, the rows of the task times their group
of query heads. It goes through the pages in blocks of tokens: keys into shared memory, then scores, weights,
and the values in the same place, with online softmax. A row's sums run over the same blocks in the same order
whatever shares its tile, so prefill and decode give the same bits. With a window, a block begins at the page
that its first row sees first.

The plan never cuts a row's keys into splits here: the scratch and the merges of the contract stay unused.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.layout import KVLayout
from kvq.schedules.attention_variant import PLAIN, AttentionVariant
from kvq.schedules.backend import AttentionShape
from kvq.schedules.cache_arguments import SCRATCH_EXTRA, attention_arguments
from kvq.schedules.statements import for_threads, put, run, when

from .block import ATTRIBUTES, WARP, add, libm, reduce_warp, sync
from .kv_append import WarpRow
from .page_blocks import PageBlocks

THREADS = 256
#: Score of a masked key: far below any real one, and finite, so that no NaN can come of it.
MASKED = -1e30


def query_rows(head_dim: int) -> int:
    """Query rows of a block: what fits shared memory beside a block of keys."""
    return 64 if head_dim <= 64 else 32 if head_dim <= 128 else 16


def attention_shape(layout: KVLayout, num_heads: int) -> AttentionShape:
    """How the plan must cut attention for :func:`tile_attention`."""
    group = num_heads // layout.num_kv_heads
    return AttentionShape(4, max(1, min(16, query_rows(layout.head_dim) // group)), 1, SCRATCH_EXTRA)


class _Tile:
    """The statements of the kernel, with its static geometry and its shared memory at hand."""

    def __init__(
        self, layout: KVLayout, num_heads: int, dtype: str, variant: AttentionVariant, thread
    ) -> None:
        self.layout, self.dtype, self.thread = layout, dtype, thread
        self.variant = variant
        self.group = num_heads // layout.num_kv_heads
        self.dim = layout.head_dim
        self.rows = query_rows(self.dim)
        self.lane = T.bind(T.bitwise_and(thread, WARP - 1))
        self.warp = T.bind(T.shift_right(thread, 5))
        self.q = T.alloc_shared((self.rows, self.dim), "float32", align=128)
        self.pages = PageBlocks(layout, thread, THREADS)
        self.tokens, self.buf = self.pages.tokens, self.pages.buf
        self.scores = T.alloc_shared((self.rows, self.tokens), "float32")
        self.fade, self.total = (T.alloc_shared((self.rows,), "float32") for _ in range(2))
        self.peak = T.alloc_shared((self.rows,), "float32")
        # of the product with the values: a thread has 4 channels of every `stride`-th row
        self.columns = self.dim // 4
        self.stride = THREADS // self.columns
        self.own_rows = -(-self.rows // self.stride)
        self.column = T.bind(T.truncmod(thread, self.columns))
        self.first = T.bind(T.truncdiv(thread, self.columns))
        self.acc = T.alloc_local((self.own_rows, 4), "float32")

    def score(self) -> None:
        """``scores = q @ buf.T``: a thread has one token and every ``THREADS / tokens``-th row."""
        token = T.bind(T.truncmod(self.thread, self.tokens))
        first = T.bind(T.truncdiv(self.thread, self.tokens))
        step = THREADS // self.tokens
        count = self.rows // step
        acc = T.alloc_local((count,), "float32")
        key = T.alloc_local((4,), "float32")
        query = T.alloc_local((4,), "float32")
        for r in range(count):
            put(acc, T.float32(0), r)
        with T.serial(self.dim // 4) as j:
            put(key, self.buf[token, run(j * 4, 4)], run(0, 4))
            for r in range(count):
                put(query, self.q[first + r * step, run(j * 4, 4)], run(0, 4))
                for i in range(4):
                    put(acc, acc[r] + query[i] * key[i], r)
        for r in range(count):
            put(self.scores, acc[r], first + r * step, token)

    def softmax(self, block, is_own, seen, hidden) -> None:
        """Scores to weights. A warp has a row, a lane a token.

        ``seen(row)`` tokens of the own page count, and of any page none of the first ``hidden(row)``.
        """

        def one(row):
            inside = self.lane < self.tokens
            at = T.bind(T.min(self.lane, self.tokens - 1))
            token = T.bind(at + block * self.tokens)
            visible = T.Or(T.Not(is_own), token < seen(row))
            if self.variant.window is not None:
                visible = T.And(visible, token >= hidden(row))
            kept = T.bind(T.And(inside, visible))
            score = self.scores[row, at]
            if self.variant.softcap is not None:
                cap = T.float32(self.variant.softcap)
                score = cap * libm("tanhf", score / cap)
            score = T.bind(T.Select(kept, score, T.float32(MASKED)))
            before = T.bind(self.peak[row])
            now = T.bind(T.max(before, reduce_warp(T.max, score)))
            weight = T.bind(T.Select(kept, libm("expf", score - now), T.float32(0)))
            total = reduce_warp(add, weight)
            fade = T.bind(libm("expf", before - now))
            when(inside, lambda: put(self.scores, weight, row, at))

            def keep():
                put(self.peak, now, row)
                put(self.fade, fade, row)
                put(self.total, self.total[row] * fade + total, row)

            # every lane has read the old maximum before the shuffles above
            when(self.lane == 0, keep)

        warps = THREADS // WARP
        with T.serial(self.rows // warps) as step:
            one(T.bind(step * warps + self.warp))

    def accumulate(self) -> None:
        """``acc = acc * fade + scores @ buf``."""
        value = T.alloc_local((4,), "float32")

        def rows(body):
            for r in range(self.own_rows):
                row = self.first + r * self.stride
                if (r + 1) * self.stride <= self.rows:
                    body(r, row)
                else:
                    when(row < self.rows, lambda r=r, row=row: body(r, row))

        def products():
            def faded(r, row):
                for i in range(4):
                    put(self.acc, self.acc[r, i] * self.fade[row], r, i)

            rows(faded)
            with T.serial(self.tokens) as t:
                put(value, self.buf[t, run(self.column * 4, 4)], run(0, 4))

                def weighted(r, row, t=t):
                    weight = T.bind(self.scores[row, t])
                    for i in range(4):
                        put(self.acc, self.acc[r, i] + weight * value[i], r, i)

                rows(weighted)

        when(self.first < self.stride, products)

    def start(self, q, first_row, num_rows, head) -> None:
        """Read the queries and clear the state."""

        def query(i):
            row, channel = T.bind(T.truncdiv(i, self.dim)), T.bind(T.truncmod(i, self.dim))
            local = T.bind(T.truncdiv(row, self.group))
            which = head * self.group + T.truncmod(row, self.group)
            value = T.if_then_else(local < num_rows, q[first_row + local, which, channel], T.float32(0))
            put(self.q, value, row, channel)

        def state(row):
            put(self.peak, T.float32(MASKED), row)
            put(self.total, T.float32(0), row)

        for_threads(self.rows * self.dim, self.thread, THREADS, query)
        for_threads(self.rows, self.thread, THREADS, state)
        for r in range(self.own_rows):
            for i in range(4):
                put(self.acc, T.float32(0), r, i)

    def attend(self, load, block, is_own, seen, hidden) -> None:
        """Add a block of tokens of a page; ``load(part)`` fills ``buf``."""
        sync()
        load(0)
        sync()
        self.score()
        sync()
        self.softmax(block, is_own, seen, hidden)
        load(1)
        sync()
        self.accumulate()

    def finish(self, out, first_row, num_rows, head) -> None:
        """Divide by the sum and write the rows; ``q`` holds them on the way."""
        sync()

        def keep():
            for r in range(self.own_rows):
                row = self.first + r * self.stride

                def one(r=r, row=row):
                    for i in range(4):
                        put(self.q, self.acc[r, i] / self.total[row], row, self.column * 4 + i)

                when(row < self.rows, one)

        when(self.first < self.stride, keep)
        sync()
        warps = THREADS // WARP
        with T.serial(self.rows // warps) as step:
            row = T.bind(step * warps + self.warp)
            local = T.bind(T.truncdiv(row, self.group))
            which = T.bind(head * self.group + T.truncmod(row, self.group))

            def write(row=row, local=local, which=which):
                line = WarpRow(self.dim, self.lane)
                line.clear()
                line.each(lambda e, channel: put(line.x, self.q[row, channel], e))
                line.each(
                    lambda e, channel: put(
                        out, T.cast(line.x[e], self.dtype), first_row + local, which, channel
                    )
                )

            when(local < num_rows, write)


def tile_attention(
    layout: KVLayout, num_heads: int, dtype: str, variant: AttentionVariant = PLAIN
) -> tirx.PrimFunc:
    """Build the kernel; ``layout`` is in the order ``fragments``, its rows in float32 and not quantized.

    Arguments of the kernel: :func:`kvq.schedules.cache_arguments.attention_arguments`; merge_tasks and
    attention_scratch are not read. One block for each entry of the list of tasks and KV head; those beyond
    the count have nothing to do. The variant has no sinks.
    """
    page = layout.page_size

    def task(at, head, thread, args):
        q, pool, kv_open, kv_workspace, num_open, positions, table, tasks, layer, out = args
        tile = _Tile(layout, num_heads, dtype, variant, thread)
        first_row = T.bind(tasks[at, 0])
        num_rows = T.bind(tasks[at, 1] - first_row)
        start = T.bind(tasks[at, 2])
        own = T.bind(T.cast(tasks[at, 3], "int64"))
        own_page = T.bind(T.shift_right(positions[first_row], page.bit_length() - 1))
        if variant.window is not None:
            first_seen = T.max(positions[first_row] - (variant.window - 1), 0)
            begin = T.bind(T.shift_right(first_seen, page.bit_length() - 1))
            start, own_page = T.bind(start + begin), T.bind(own_page - begin)

        def seen(row):
            local = T.min(T.truncdiv(row, tile.group), num_rows - 1)
            return T.bitwise_and(positions[first_row + local], page - 1) + 1

        last = T.bind(seen(num_rows * tile.group - 1))

        def row(part, i):
            """A number of the own page, which is open or in the workspace."""
            opened = kv_open[T.min(own, num_open - 1), layer, head, part, i]
            return T.if_then_else(own < num_open, opened, kv_workspace[own - num_open, head, part, i])

        tile.start(q, first_row, num_rows, head)
        with T.serial(own_page + 1) as index:
            is_own = T.bind(index == own_page)
            entry = T.bind(T.cast(table[start + T.max(T.min(index, own_page - 1), 0)], "int64"))

            def number(part, i, entry=entry):
                return T.reinterpret("float32", pool[entry, layer, head, part * layout.v_offset + i])

            sync()
            with T.serial(page // tile.tokens) as block:

                def load(part, block=block, is_own=is_own):
                    with T.If(is_own):
                        with T.Then():
                            tile.pages.load(block, lambda i: row(part, i), last)
                        with T.Else():
                            tile.pages.load(block, lambda i: number(part, i), page)

                def hidden(row, index=index):
                    return (own_page - index) * page + seen(row) - variant.window

                tile.attend(load, block, is_own, seen, hidden)
        tile.finish(out, first_row, num_rows, head)

    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        a = attention_arguments(layout, num_heads, dtype)
        T.device_entry()
        head, at = T.cta_id([layout.num_kv_heads, T.cast(a.num_tasks, "int32")])
        thread = T.thread_id([THREADS])
        rows = (a.kv_open, a.workspace, a.num_open, a.positions, a.table, a.tasks)
        with T.If(at < a.counts[2]), T.Then():
            task(at, head, thread, (a.q, a.pool, *rows, a.layer, a.out))
    return script.get()
