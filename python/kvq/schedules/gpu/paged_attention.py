"""paged_attention: online softmax over sealed pages and the query's own row page, for any GPU.

A workgroup has one attention task of one KV head: a row or some, each with its group of query heads
(:mod:`.attention_tile` says who does what). Of each of its pages it makes scores (:mod:`.page_keys`), weights
(:mod:`.page_softmax`) and sums (:mod:`.page_values`), with four barriers a page. A row that was
split leaves its results in ``attention_scratch``; a second launch merges them (:mod:`.attention_merge`).
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.layout import KVLayout
from kvq.schedules.attention_variant import AttentionVariant
from kvq.schedules.backend import AttentionShape
from kvq.schedules.cache_arguments import SCRATCH_EXTRA, AttentionArguments, attention_arguments
from kvq.schedules.statements import for_threads, put, when

from .attention_merge import merge_rows
from .attention_task import SPLIT_PAGES, each_own, own_end, read_task
from .attention_tile import LANES, TEAMS, THREADS, Team, Tile, make_tile
from .block import ATTRIBUTES, either, held, launch, local, sync
from .hadamard import rotate
from .limits import GpuLimits
from .page_codes import one_bits
from .page_keys import KeyScales, KeyScores
from .page_softmax import PageSoftmax, Shared, softmax_memory
from .page_values import ValueSums

#: Partial results of split rows that the scratch holds.
SCRATCH_SLOTS = 1024


def attention_shape(layout: KVLayout, num_heads: int, limits: GpuLimits) -> AttentionShape:
    """How the plan must cut attention for :func:`paged_attention`.

    Raises
    ------
    CompileError
        If the GPU's workgroups are too small for it.
    """
    tile = make_tile(layout, num_heads, limits)
    return AttentionShape(SPLIT_PAGES, tile.rows, SCRATCH_SLOTS, SCRATCH_EXTRA)


class _Kernel:
    """The statements of the kernel, with its static geometry and its shared memory at hand."""

    def __init__(self, a: AttentionArguments, tile: Tile, dtype: str, variant: AttentionVariant) -> None:
        self.a, self.tile, self.layout, self.dtype, self.variant = a, tile, tile.layout, dtype, variant

    def run(self, at, head, thread, memory: Shared, scales: KeyScales) -> None:
        """One task of one KV head."""
        a, page, tile, task = (
            self.a,
            self.layout.page_size,
            self.tile,
            read_task(self.a, self.layout, self.variant, at),
        )
        self.task, self.head, self.thread, self.memory = task, head, thread, memory
        self.team = Team(tile, task.num_rows * tile.group, thread)
        states = [held(self.team.block * tile.team_states + i) for i in range(tile.team_states)]
        queries = [self.query_place(state) for state in states]

        def query(channel):
            return [T.bind(a.q[(*place, channel)]) for place in queries]

        def weights(token):
            return [T.bind(memory.arena[state * page + token]) for state in states]

        team, count, one = self.team, tile.team_states, one_bits(a.counts[2])
        keys = KeyScores(self.layout, team, scales, count, query, one)
        values = ValueSums(self.layout, team.lane, LANES, count, weights, one, team.slice, team.slices)
        softmax = PageSoftmax(tile, self.team, self.variant, keys, memory)
        softmax.clear()
        values.clear()

        def unit(index):
            return T.bind(a.table[task.table + index]), a.layer, head

        def offset(state):
            """Place in its page of a state's row."""
            return T.bitwise_and(self.position(state), page - 1)

        def one_page(index):
            sealed, following = T.bind(index < task.own_page), T.bind(index + 1)
            more = T.bind(following < task.sealed_end)

            def read_sealed():
                where = unit(index)
                keys.add_page(a.pool, where)
                softmax.load_scales(a.pool, where)
                when(more, lambda: scales.gather(a.pool, unit(following)))

            def read_own():
                each_own(a, task, head, lambda row: keys.add_rows(lambda i: row(0, i)))

            def hidden(state):
                return self.position(state) - (self.variant.window - 1) - index * page

            def seen(state):
                return T.Select(sealed, page, offset(state) + 1)

            def add_sealed():
                where = unit(index)
                values.fetch(a.pool, where)
                values.add_page(a.pool, where)

            def add_own():
                end = own_end(a, self.layout, task)
                each_own(a, task, head, lambda row: values.add_rows(lambda i: row(1, i), end))

            keys.clear()
            softmax.unit_scales()
            either(sealed, read_sealed, read_own)
            softmax.offer(hidden if self.variant.window is not None else None, seen)
            sync()
            when(more, scales.prepare)
            softmax.weigh(T.bitwise_and(index, 1))
            sync()
            values.fade([T.bind(memory.factors[state]) for state in states])
            either(sealed, add_sealed, add_own)
            sync()

        def prepare_first():
            first = unit(task.begin)
            scales.gather(a.pool, first)
            sync()
            scales.prepare()

        if scales.quantized:
            when(task.begin < task.sealed_end, prepare_first)
        sync()
        with T.serial(task.end - task.begin) as step:
            one_page(T.bind(task.begin + step))
        self.finish(values)

    def query_place(self, state):
        """Row and head of a query; of states beyond the last, those of another."""
        row = T.min(T.truncdiv(state, self.tile.group), self.task.num_rows - 1)
        which = T.truncmod(state, self.tile.group)
        return held(self.task.first_row + row), held(self.head * self.tile.group + which)

    def position(self, state):
        """Position of the row of a state."""
        return self.a.positions[self.query_place(state)[0]]

    def finish(self, values: ValueSums) -> None:
        """Write the rows of a task: divided by their sums, the rotation of V undone.

        Of a row that was split, the results go to the scratch as they are.
        """
        a, tile, team, task, memory = self.a, self.tile, self.team, self.task, self.memory
        dim, whole = self.layout.head_dim, T.bind(self.task.slot < 0)
        states = held(task.num_rows * tile.group)
        parity = T.bind(T.bitwise_and(task.end, 1))
        stride = held(team.blocks * dim)

        def factor(state):
            total = T.float32(0)
            for lane in range(LANES):
                total = T.bind(total + memory.totals[state * LANES + lane])
            peak, head = T.bind(memory.peak[parity, state]), self.query_place(state)[1]

            def divide():
                if a.sinks is None:
                    put(memory.factors, T.float32(1) / total, state)
                    return
                sink = T.bind(a.sinks[head])
                now = T.bind(T.max(peak, sink))
                fade = T.bind(T.exp(peak - now))
                put(memory.factors, fade / (total * fade + T.exp(sink - now)), state)

            def keep():
                put(a.scratch, peak, task.slot, head, dim)
                put(a.scratch, total, task.slot, head, dim + 1)
                put(memory.factors, T.float32(1), state)

            either(whole, divide, keep)

        def lot(turn):
            """Each team's state number ``turn``: slices added up, then rows of the arena."""

            def keep(i, k):
                channel = values.channel(k)
                place = team.index * dim + channel
                inside = T.And(turn == i, channel < dim)
                when(inside, lambda: put(memory.arena, values.sums[i, k], place))

            def for_inside(body):
                def one(index):
                    state = held(T.truncdiv(index, dim) * tile.team_states + turn)
                    when(T.And(index < stride, state < states), lambda: body(index, state))

                for_threads(TEAMS * dim, self.thread, THREADS, one)

            def add_up(index, state):
                put(total, T.float32(0), 0)
                with T.serial(team.slices) as s:
                    put(total, total[0] + memory.arena[s * stride + index], 0)
                put(memory.arena, total[0] * memory.factors[state], index)

            def write(index, state):
                row, head = self.query_place(state)
                channel, value = held(T.truncmod(index, dim)), T.bind(memory.arena[index])
                either(
                    whole,
                    lambda: put(a.out, T.cast(value, self.dtype), row, head, channel),
                    lambda: put(a.scratch, value, task.slot, head, channel),
                )

            total = local((1,), "float32")
            values.each(keep)
            sync()
            for_inside(add_up)
            sync()
            if self.layout.v_bits is not None:
                when(whole, lambda: rotate(memory.arena, 0, TEAMS * dim, dim, self.thread, THREADS))
            for_inside(write)
            sync()

        when(self.thread < states, lambda: factor(self.thread))
        sync()
        with T.serial(tile.team_states) as turn:
            lot(turn)


def paged_attention(
    layout: KVLayout, num_heads: int, dtype: str, variant: AttentionVariant, limits: GpuLimits
) -> tirx.PrimFunc:
    """Build the kernel; ``layout`` is in the order ``lanes``.

    Arguments of the kernel: :func:`kvq.schedules.cache_arguments.attention_arguments`. One workgroup for
    each entry of the list of tasks and KV head, then one for each entry of the list of merges and query head;
    those beyond the counts have nothing to do.

    Raises
    ------
    CompileError
        If the GPU's workgroups are too small for it.
    """
    tile = make_tile(layout, num_heads, limits)

    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        a = attention_arguments(layout, num_heads, dtype, variant.sinks, rows="int32")
        with launch([layout.num_kv_heads, T.cast(a.num_tasks, "int32")], THREADS) as (head, at, thread):
            kernel = _Kernel(a, tile, dtype, variant)
            memory, scales = softmax_memory(tile), KeyScales(layout, thread)
            when(at < a.counts[2], lambda: kernel.run(at, head, thread, memory, scales))
        merge_rows(a, layout, num_heads, dtype)
    return script.get()
