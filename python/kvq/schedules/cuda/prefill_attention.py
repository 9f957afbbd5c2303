"""paged_attention for prefill, on tensor cores: a tile of rows of one page a task.

A block has the rows of one attention task times the query heads of one KV head, 16 of them a warp. Its warps
go through the sealed pages together, in a ring of shared memory that ``cp.async`` fills a few pages ahead::

    S[rows, tokens] = Q K^T         A = queries times the page's key scales, B = key codes
    P = exp2(S - m)                 m grows only when it must
    O[rows, D] += P V               A = P times the values' scales, B = value codes

``prefill_warp.py`` is what a warp does with a page. The rows' own page goes first, in tiles of 16 fp16 rows.
A row's sums do not depend on what shares its tile. Windows, soft-capping and sinks are built in where a layer
has them; then decode comes here too, with a row a task.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.layout import FRAGMENT_TILE, KVLayout
from kvq.schedules.attention_variant import PLAIN, AttentionVariant
from kvq.schedules.backend import AttentionShape
from kvq.schedules.cache_arguments import SCRATCH_EXTRA, TASK_FIELDS, attention_arguments
from kvq.schedules.statements import for_threads, put

from .block import ATTRIBUTES
from .mma import WARP, block_sync, copies_commit, copies_wait, copy_async, u32
from .paged_attention import TASK_FIELDS as DECODE_TASK_FIELDS
from .prefill_query import PrefillQuery
from .prefill_warp import ROWS, WARPS, Place, PrefillWarp


def attention_shape(layout: KVLayout, num_heads: int) -> AttentionShape:
    """How the plan must cut attention for :func:`prefill_attention`: rows stay whole."""
    group = num_heads // layout.num_kv_heads
    return AttentionShape(4, max(1, min(layout.page_size, ROWS // group)), 1, SCRATCH_EXTRA)


class _Task:
    """The statements of a block: one attention task of one KV head."""

    def __init__(self, layout: KVLayout, num_heads: int, dtype: str, variant: AttentionVariant) -> None:
        self.layout, self.dtype, self.variant = layout, dtype, variant
        self.group, self.threads = num_heads // layout.num_kv_heads, WARPS * WARP
        self.place = Place(layout)

    def run(self, fields, head, thread, shared, args) -> None:
        """``fields``: first row, number of rows, start in the page table, row page of the rows' own page."""
        q, pool, kv_open, kv_workspace, num_open, positions, table, sinks, layer, out = args
        layout, place, page, group = self.layout, self.place, self.layout.page_size, self.group
        lane, warp = T.bind(T.bitwise_and(thread, WARP - 1)), T.bind(T.shift_right(thread, 5))
        base = T.bind(T.cuda.cvta_generic_to_shared(shared.data))
        first_row, num_rows, table_start, own = (T.bind(field) for field in fields)
        own = T.bind(T.cast(own, "int64"))
        own_page = T.bind(T.shift_right(positions[first_row], page.bit_length() - 1))
        windowed, skipped = self.variant.window is not None, 0
        if windowed:  # pages that no row of the task sees
            first = positions[first_row] - T.int32((self.variant.window or 0) - 1)
            skipped = T.bind(T.shift_right(T.max(first, 0), page.bit_length() - 1))
        sealed = T.bind(own_page - skipped)

        def locate(row):
            local = T.bind(T.truncdiv(row, group))
            return local < num_rows, first_row + local, head * group + T.truncmod(row, group)

        def position(row):
            return positions[first_row + T.min(T.truncdiv(row, group), num_rows - 1)]

        def seen(row):
            return T.bitwise_and(position(row), page - 1) + 1

        entry = T.alloc_local([1], "int32")

        def next_entry(index) -> None:
            at = skipped + T.max(T.min(index, sealed - 1), 0)
            put(entry, table[table_start + at], 0)

        def copy(stage) -> None:
            source = T.bind(T.cast(entry[0], "int64"))

            def vector(i):
                target = T.bind(base + T.cast(stage * place.page_bytes + i * 16, "uint32"))
                copy_async(target, 0, pool.ptr_to([source, layer, head, i * 4]), 0)

            for_threads(layout.unit_words // 4, thread, self.threads, vector)

        for s in range(place.stages - 1):
            with T.If(s < sealed), T.Then():
                next_entry(s)
                copy(s)
            copies_commit()
        with T.If(sealed > 0), T.Then():
            next_entry(place.stages - 1)
        PrefillQuery.load(layout, base + u32(place.query_at), q, ROWS, thread, self.threads, locate)
        body = PrefillWarp(layout, self.variant, base, warp, lane)
        body.clear()
        block_sync()
        rows = [T.bind(warp * FRAGMENT_TILE + body.g + 8 * y) for y in range(2)]
        own_seen = [T.bind(seen(row)) for row in rows]
        first_seen = None
        if windowed:
            window = T.int32(self.variant.window or 0)
            first_seen = [T.bind(position(row) - window + 1) for row in rows]

        def in_page(index):
            """First tokens of a page that the rows see."""
            return [T.bind(first - index * page) for first in first_seen] if first_seen else None

        def own_rows(source, start):
            last = T.bind(seen(ROWS - 1))
            body.attend_own(
                lambda part, i: source.ptr_to([*start, part, i]), last, own_seen, in_page(own_page)
            )

        if kv_workspace is None:
            own_rows(kv_open, (own, layer, head))
        else:
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
            body.attend(here, T.bitwise_and(index, 1), in_page(index + skipped))

        def write(r, line):
            valid, row, which = locate(warp * FRAGMENT_TILE + r)
            with T.If(valid), T.Then():
                line.each(lambda e, channel: put(out, T.cast(line.x[e], self.dtype), row, which, channel))

        logits = None
        if sinks is not None:
            logits = [T.bind(sinks[head * group + T.truncmod(row, group)]) for row in rows]
        body.finish(write, logits)


def prefill_attention(
    layout: KVLayout,
    num_heads: int,
    dtype: str,
    variant: AttentionVariant = PLAIN,
    single_rows: bool = False,
) -> tirx.PrimFunc:
    """Build the kernel; ``layout`` is in the order ``fragments``, its rows in float16.

    Arguments of the kernel: :func:`kvq.schedules.cache_arguments.attention_arguments`; merge_tasks and
    attention_scratch are not read. One block for each entry of the list of tasks and KV head; those beyond
    the count have nothing to do.

    Parameters
    ----------
    single_rows : bool
        The tasks are those of :mod:`kvq.runtime.decode_plan`. A row is computed by the block of its first
        part: what a window leaves is not worth cutting.
    """
    kernel = _Task(layout, num_heads, dtype, variant)
    task_fields = DECODE_TASK_FIELDS if single_rows else TASK_FIELDS
    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        a = attention_arguments(layout, num_heads, dtype, variant.sinks, task_fields)
        tasks = a.tasks
        T.device_entry()
        place = kernel.place
        limits = {
            "tirx.launch_bounds_min_blocks_per_sm": place.blocks_per_sm,
            "tirx.dyn_smem_bytes": place.shared_bytes,
        }
        with T.attr(limits):
            head, at = T.cta_id([layout.num_kv_heads, T.cast(a.num_tasks, "int32")])
            thread = T.thread_id([kernel.threads])
            shared = T.alloc_buffer((place.shared_bytes,), "uint8", scope="shared.dyn", align=128)
            mine = at < a.counts[2]
            if single_rows:
                mine = T.And(mine, tasks[T.min(at, a.counts[2] - 1), 7] == 0)
                fields = (tasks[at, 0], T.int32(1), tasks[at, 1], tasks[at, 3])
            else:
                fields = (tasks[at, 0], tasks[at, 1] - tasks[at, 0], tasks[at, 2], tasks[at, 3])
            # a single row stands in its open page
            rows = (a.kv_open, None if single_rows else a.workspace, a.num_open)
            arguments = (a.q, a.pool, *rows, a.positions, a.table, a.sinks, a.layer, a.out)
            with T.If(mine), T.Then():
                kernel.run(fields, head, thread, shared, arguments)
    return script.get()
