"""paged_attention: online softmax over sealed pages and the query's own row page.

One task of the parallel loop is (attention task, KV head): at most ``TILE_ROWS`` rows of one sequence,
all in one page of positions, with their whole group of query heads; ``page_attention`` says what a page does
to them. Decode is a tile of one row, so decode and prefill are the same machine code and a row's result
cannot depend on what shares its tile.

The keys of a row are cut into splits of ``SPLIT_PAGES`` pages. Each split starts from nothing and is
merged into the row's total in order, whether one task walked through all of them or several tasks left
their partial results in ``attention_scratch`` for the merge at the end: the same bits either way.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.layout import KVLayout
from kvq.schedules.attention_variant import PLAIN, AttentionVariant
from kvq.schedules.cache_arguments import attention_arguments
from kvq.schedules.statements import put, run

from .page_attention import PageAttention
from .row_ops import hadamard_inplace
from .vector import MASKED, CpuIsa, constant, exp, fma, reduce_lanes, splat

#: Most rows of an attention task.
TILE_ROWS = 16
#: Key pages of a split.
SPLIT_PAGES = 4


class _Kernel(PageAttention):
    """The statements of the kernel: rows of a task walk through their pages, split by split."""

    def merge(self, total, index, peak, added, source, source_index) -> None:
        """Merge a split into ``total[index]``: its maximum, its sum, and ``source[source_index, D]``."""
        total_m, total_l, total_o = total
        lanes = self.d_lanes
        now = T.bind(T.max(total_m[index], peak))
        fade = T.bind(exp(splat(total_m[index] - now, lanes), lanes))
        gain = T.bind(exp(splat(peak - now, lanes), lanes))
        put(total_m, now, index)
        old = total_l[index, run(0, lanes)]
        put(total_l, fma(splat(added, lanes), gain, old * fade, lanes), index, run(0, lanes))
        with T.serial(self.dim // lanes) as j:
            at = run(j * lanes, lanes)
            faded = total_o[index, at] * fade
            put(total_o, fma(source[(*source_index, at)], gain, faded, lanes), index, at)

    def clear(self, state, index, sum_lanes: int) -> None:
        """Start the state at ``index`` from nothing."""
        peak, sums, acc_out = state
        put(peak, T.float32(MASKED), index)
        put(sums, constant(0, sum_lanes), index, run(0, sum_lanes))
        with T.serial(self.dim // self.d_lanes) as j:
            put(acc_out, constant(0, self.d_lanes), index, run(j * self.d_lanes, self.d_lanes))

    def add_sink(self, total, index, sink) -> None:
        """Bring ``total[index]`` to the maximum of itself and the sink, and add the sink's weight."""
        total_m, total_l, total_o = total
        lanes = self.d_lanes
        now = T.bind(T.max(total_m[index], sink))
        fade = T.bind(exp(splat(total_m[index] - now, lanes), lanes))
        gain = T.bind(exp(splat(sink - now, lanes), lanes))
        put(total_l, fma(total_l[index, run(0, lanes)], fade, gain, lanes), index, run(0, lanes))
        with T.serial(self.dim // lanes) as j:
            at = run(j * lanes, lanes)
            put(total_o, total_o[index, at] * fade, index, at)

    def finish(self, total, index, sinks, out, row, head, x, t) -> None:
        """Divide by the sum, undo the rotation of V and write ``out[row, head]``."""
        if sinks is not None:
            self.add_sink(total, index, T.bind(sinks[head]))
        _, total_l, total_o = total
        lanes = self.d_lanes
        with T.serial(self.dim // lanes) as j:
            at = run(j * lanes, lanes)
            put(x, total_o[index, at] / total_l[index, run(0, lanes)], at)
        if self.layout.v_bits is not None:
            hadamard_inplace(x, t, self.dim)
        with T.serial(self.dim // lanes) as j:
            at = run(j * lanes, lanes)
            put(out, T.cast(x[at], f"{self.dtype}x{lanes}"), row, head, at)

    def first_token(self, position):
        """The first token that a row at ``position`` sees; there is a window."""
        return T.max(position - T.int32(self.variant.window - 1), T.int32(0))

    def task(self, item, args) -> None:
        """One attention task of one KV head."""
        q, pool, kv_open, kv_workspace, num_open, positions, table, tasks, layer, scratch, sinks, out = args
        layout, group, lanes = self.layout, self.group, self.lanes
        states = TILE_ROWS * group
        at = T.bind(T.truncdiv(item, T.int32(layout.num_kv_heads)))
        head = T.bind(T.truncmod(item, T.int32(layout.num_kv_heads)))
        first_row, num_rows = T.bind(tasks[at, 0]), T.bind(tasks[at, 1] - tasks[at, 0])
        own_page = T.bind(T.shift_right(positions[first_row], T.int32(self.page.bit_length() - 1)))
        own = T.bind(T.cast(tasks[at, 3], "int64"))
        buf = T.sblock_alloc_buffer((self.tokens * self.dim,), "float32")
        k_scale, k_minimum = (T.sblock_alloc_buffer((self.dim,), "float32") for _ in range(2))
        v_scale = T.sblock_alloc_buffer((self.page,), "float32")
        pairs = T.sblock_alloc_buffer((self.pages.first_pair(len(layout.k_classes)),), "int32")
        query = T.sblock_alloc_buffer((group, self.dim + 1), "float32")
        scores = T.sblock_alloc_buffer((states, self.page), "float32")
        red = T.sblock_alloc_buffer((lanes,), "float32")
        x = T.sblock_alloc_buffer((self.dim,), "float32")
        t = T.sblock_alloc_buffer((self.dim,), "float32")
        split = tuple(
            T.sblock_alloc_buffer(shape, "float32")
            for shape in ((states,), (states, lanes), (states, self.dim))
        )
        total = tuple(
            T.sblock_alloc_buffer(shape, "float32")
            for shape in ((states,), (states, self.d_lanes), (states, self.dim))
        )
        buffers = (buf, k_scale, k_minimum, v_scale, query, scores, red)
        with T.serial(num_rows * group) as i:
            self.clear(total, i, self.d_lanes)
        windowed = self.variant.window is not None
        if windowed:
            seen_page = T.bind(
                T.shift_right(self.first_token(positions[first_row]), T.int32(self.page.bit_length() - 1))
            )
        with T.serial(tasks[at, 5] - tasks[at, 4]) as s:
            number = T.bind(tasks[at, 4] + s)
            with T.serial(num_rows * group) as i:
                self.clear(split, i, lanes)
            start = number * SPLIT_PAGES
            pages = T.bind(T.min(own_page + 1 - start, SPLIT_PAGES))
            if windowed:
                skipped = T.bind(T.max(seen_page - start, T.int32(0)))
                start, pages = start + skipped, T.bind(T.max(pages - skipped, T.int32(0)))
            with T.serial(pages) as p:
                j = T.bind(start + p)
                is_own = T.bind(j == own_page)

                def pool_page(index):
                    # the first of a sequence's pages may be its own: then there is none to look up
                    number = T.if_then_else(is_own, T.int32(0), table[tasks[at, 2] + index])
                    return T.bind(T.cast(number, "int64"))

                unit = (pool_page(j), layer, head)
                following = (pool_page(T.min(j + 1, own_page - 1)), layer, head)
                self.load_scales(is_own, pool, unit, following, pairs, k_scale, k_minimum, v_scale)
                rows = (kv_open, kv_workspace, num_open)

                def load(part: int, block: int) -> None:
                    """K (part 0) or V (part 1) of a block of the page, wherever it stands."""
                    with T.If(is_own):
                        with T.Then():
                            self.pages.load_own(rows, own, layer, head, part, block, buf)
                        with T.Else():
                            if part == 0:
                                self.pages.load_keys(pool, unit, pairs, block, buf)
                            else:
                                self.pages.load_values(pool, unit, block, buf)

                def seen(i):
                    own_tokens = T.bitwise_and(positions[first_row + i], T.int32(self.page - 1)) + 1
                    end = T.bind(T.Select(is_own, own_tokens, T.int32(self.page)))
                    if not windowed:
                        return None, end
                    first = self.first_token(positions[first_row + i]) - j * T.int32(self.page)
                    return T.bind(T.max(first, T.int32(0))), end

                half = T.float32(2 ** (layout.v_bits - 1) if layout.v_bits else 0)
                zero = T.bind(T.Select(is_own, T.float32(0), half))
                self.attend(load, zero, (num_rows, first_row, seen), q, head, buffers, split)
            with T.serial(num_rows * group) as i:
                peak, sums, acc_out = split
                add = T.bind(reduce_lanes(lambda a, b: a + b, sums[i, run(0, lanes)], red, lanes))
                slot = T.bind(tasks[at, 6])
                with T.If(slot < 0):
                    with T.Then():
                        self.merge(total, i, peak[i], add, acc_out, (i,))
                    with T.Else():
                        where = (T.bind(T.cast(slot + s, "int64")), head * group + i)
                        put(scratch, peak[i], *where, self.dim)
                        put(scratch, add, *where, self.dim + 1)
                        with T.serial(self.dim // self.d_lanes) as e:
                            part = run(e * self.d_lanes, self.d_lanes)
                            put(scratch, acc_out[i, part], *where, part)
        with T.If(tasks[at, 6] < 0), T.Then(), T.serial(num_rows) as i, T.serial(group) as r:
            self.finish(total, i * group + r, sinks, out, first_row + i, head * group + r, x, t)

    def merge_task(self, item, args) -> None:
        """Merge the scratch slots of one row and query head, in order of splits."""
        scratch, merges, sinks, out = args
        at = T.bind(T.truncdiv(item, T.int32(self.num_heads)))
        head = T.bind(T.truncmod(item, T.int32(self.num_heads)))
        x = T.sblock_alloc_buffer((self.dim,), "float32")
        t = T.sblock_alloc_buffer((self.dim,), "float32")
        total = tuple(
            T.sblock_alloc_buffer(shape, "float32") for shape in ((1,), (1, self.d_lanes), (1, self.dim))
        )
        self.clear(total, 0, self.d_lanes)
        with T.serial(merges[at, 2]) as s:
            slot = T.bind(T.cast(merges[at, 1] + s, "int64"))
            peak, added = (T.bind(scratch[slot, head, self.dim + i]) for i in range(2))
            self.merge(total, 0, peak, added, scratch, (slot, head))
        self.finish(total, 0, sinks, out, merges[at, 0], head, x, t)

    def build(self) -> tirx.PrimFunc:
        """The kernel. Which arguments it has depends on the variant, so it is not a script."""
        layout, heads = self.layout, self.num_heads
        with IRBuilder() as script, builder.prim_func(is_private=True, s_tir=True):
            T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
            a = attention_arguments(layout, heads, self.dtype, self.variant.sinks)
            rows = (a.q, a.pool, a.kv_open, a.workspace, a.num_open, a.positions, a.table, a.tasks)
            num_tasks, num_merges = a.counts[2] * layout.num_kv_heads, a.counts[3] * heads
            with T.parallel(num_tasks) as item:
                block("attention", num_tasks, item, self.task, (*rows, a.layer, a.scratch, a.sinks, a.out))
            with T.If(a.counts[3] > 0), T.Then(), T.serial(num_merges) as item:
                block("merge", num_merges, item, self.merge_task, (a.scratch, a.merges, a.sinks, a.out))
        return script.get()


def block(name: str, count, item, body, args) -> None:
    """Emit ``body(item, args)`` as the block of a loop over ``count`` items."""
    with T.sblock(name):
        index = IRBuilder.name("vi", T.axis.spatial(count, IRBuilder.name("item", item)))
        T.reads()
        T.writes()
        body(index, args)


def paged_attention(
    layout: KVLayout, num_heads: int, dtype: str, isa: CpuIsa, variant: AttentionVariant = PLAIN
) -> tirx.PrimFunc:
    """Build the kernel.

    Arguments of the kernel: :func:`kvq.schedules.cache_arguments.attention_arguments`.
    """
    return _Kernel(layout, num_heads, dtype, isa, variant).build()
