"""paged_attention: online softmax over sealed pages and the query's own row page, for any GPU.

A workgroup has one attention task of one KV head: a row or some, each with its group of query heads
(:mod:`.attention_tile` says who does what). Of each of its pages it makes scores (:mod:`.page_keys`), weights
(:mod:`.page_softmax`) and sums (:mod:`.page_values`), with four barriers a page. A row that was
split leaves its results in ``attention_scratch``; a second launch merges them (:mod:`.attention_merge`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.layout import KVLayout
from kvq.schedules.attention_variant import AttentionVariant
from kvq.schedules.backend import AttentionShape
from kvq.schedules.cache_arguments import SCRATCH_EXTRA, AttentionArguments, attention_arguments

from .attention_merge import merge_rows
from .attention_tile import LANES, TEAMS, THREADS, Team, Tile, make_tile
from .block import ATTRIBUTES, for_threads, held, launch, local, put, shared, sync, when
from .hadamard import rotate
from .limits import GpuLimits
from .page_keys import KeyScales, KeyScores
from .page_softmax import PageSoftmax, Shared
from .page_values import ValueSums

#: Key pages of a split.
SPLIT_PAGES = 4
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


class _Task(NamedTuple):
    """A task: its rows, where page 0 is in the table, its own page, its pages, and its scratch slot or -1."""

    first_row: Any
    num_rows: Any
    table: Any
    row_page: Any
    begin: Any
    own_page: Any
    sealed_end: Any
    has_own: Any
    slot: Any


class _Kernel:
    """The statements of the kernel, with its static geometry and its shared memory at hand."""

    def __init__(self, a: AttentionArguments, tile: Tile, dtype: str, variant: AttentionVariant) -> None:
        self.a, self.tile, self.layout, self.dtype, self.variant = a, tile, tile.layout, dtype, variant
        self.page_shift = self.layout.page_size.bit_length() - 1

    def read_task(self, at) -> _Task:
        a, tasks = self.a, self.a.tasks
        first_row = T.bind(tasks[at, 0])
        position = T.bind(a.positions[first_row])
        own_page = T.bind(T.shift_right(position, self.page_shift))
        begin, end = tasks[at, 4] * SPLIT_PAGES, T.bind(tasks[at, 5] * SPLIT_PAGES)
        if self.variant.window is not None:
            seen = T.max(position - (self.variant.window - 1), 0)
            begin = T.max(begin, T.shift_right(seen, self.page_shift))
        return _Task(
            first_row,
            T.bind(tasks[at, 1] - first_row),
            T.bind(tasks[at, 2]),
            T.bind(tasks[at, 3]),
            T.bind(begin),
            own_page,
            T.bind(T.min(end, own_page)),
            T.bind(end > own_page),
            T.bind(tasks[at, 6]),
        )

    def run(self, at, head, thread, memory: Shared, scales: KeyScales) -> None:
        """One task of one KV head."""
        a, page, tile, task = self.a, self.layout.page_size, self.tile, self.read_task(at)
        self.task, self.head, self.thread, self.memory = task, head, thread, memory
        self.team = Team(tile, task.num_rows * tile.group, thread)
        keys = KeyScores(tile, self.team, scales, local((tile.tokens, tile.team_states), "float32"))
        values = ValueSums(tile, self.team, memory.arena)
        softmax = PageSoftmax(tile, self.team, self.variant, keys, memory)
        softmax.clear()
        values.each(lambda i, k: put(values.sums, T.float32(0), i, k))
        first_state = T.bind(self.team.block * tile.team_states)
        queries = [self.query_place(first_state + i) for i in range(tile.team_states)]

        def query(i, channel):
            return a.q[(*queries[i], channel)]

        def unit(index):
            return T.bind(a.table[task.table + index]), a.layer, head

        def hidden(index):
            if self.variant.window is None:
                return None
            return lambda state: self.position(state) - (self.variant.window - 1) - index * page

        def weigh(index, end, prepare, scaled: bool) -> None:
            """Weights of the page's values, while the next page's scales are prepared."""
            softmax.add_up()
            softmax.mask(hidden(index), end)
            sync()
            prepare()
            softmax.weigh(scaled, end is not None or self.variant.window is not None)
            sync()
            values.fade(memory.factors)

        def sealed_page(index):
            where = unit(index)
            following = T.bind(index + 1)
            more = T.bind(following < task.sealed_end)
            keys.clear()
            keys.add_page(query, a.pool, where)
            softmax.load_scales(a.pool, where)
            when(more, lambda: scales.gather(a.pool, unit(following)))

            def prepare():
                when(more, lambda: scales.prepare(a.pool, unit(following)))

            weigh(index, None, prepare, self.layout.v_bits is not None)
            values.add_page(a.pool, where)
            sync()

        def sealed_pages():
            if scales.quantized:
                first = unit(task.begin)
                scales.gather(a.pool, first)
                sync()
                scales.prepare(a.pool, first)
                sync()
            with T.serial(task.sealed_end - task.begin) as step:
                sealed_page(T.bind(task.begin + step))

        def own_page():
            keys.clear()
            self.each_own(lambda row: keys.add_rows(query, lambda i: row(0, i)))
            weigh(task.own_page, lambda state: self.offset(self.position(state)) + 1, lambda: None, False)
            last = a.positions[task.first_row + task.num_rows - 1]
            seen = T.bind(self.offset(last) + 1)
            self.each_own(lambda row: values.add_rows(lambda i: row(1, i), seen))
            sync()

        when(task.begin < task.sealed_end, sealed_pages)
        when(task.has_own, own_page)
        softmax.offer()
        sync()
        with T.If(task.slot < 0):
            with T.Then():
                self.finish(values)
            with T.Else():
                self.leave(values)

    def query_place(self, state):
        """Row and head of a query; of states beyond the last, those of another."""
        row = T.min(T.truncdiv(state, self.tile.group), self.task.num_rows - 1)
        which = T.truncmod(state, self.tile.group)
        return held(self.task.first_row + row), held(self.head * self.tile.group + which)

    def position(self, state):
        """Position of the row of a state."""
        return self.a.positions[self.query_place(state)[0]]

    def offset(self, position):
        """Place of a position in its page."""
        return T.bitwise_and(position, self.layout.page_size - 1)

    def each_own(self, body) -> None:
        """Emit ``body(row)`` for the own page, ``row(part, i)`` a number of it, wherever it stands."""
        a, own = self.a, self.task.row_page
        num_open = T.cast(a.num_open, "int32")

        def number(rows, where):
            return lambda part, i: T.cast(rows[(*where, part, i)], "float32")

        with T.If(own < num_open):
            with T.Then():
                body(number(a.kv_open, (own, a.layer, self.head)))
            with T.Else():
                body(number(a.workspace, (own - num_open, self.head)))

    # ---- the end of a task -----------------------------------------------------------------------
    def each_state(self, body) -> None:
        """Emit ``body(state)`` for every state of the task, a thread each. A barrier must follow."""
        count = T.bind(self.task.num_rows * self.tile.group)
        when(self.thread < count, lambda: body(self.thread))

    def total(self, state):
        """Sum of the weights of a state."""
        total = T.float32(0)
        for lane in range(LANES):
            total = T.bind(total + self.memory.peaks[state * LANES + lane])
        return total

    def results(self, values: ValueSums, rotated: bool, store) -> None:
        """Bring the slices' sums together and emit ``store(state, channel, value)``.

        In turn, each team's ``i``-th state: multiplied by its factor, the rotation of V undone or not.
        """
        tile, team, arena, dim = self.tile, self.team, self.memory.arena, self.layout.head_dim
        stride = T.bind(team.blocks * dim)

        def lot(turn):
            def keep(i, k):
                channel = values.channel(k)
                place = T.bind(team.index * dim + channel)
                when(T.And(turn == i, channel < dim), lambda: put(arena, values.sums[i, k], place))

            def state_of(index):
                return T.bind(T.truncdiv(index, dim) * tile.team_states + turn)

            def inside(index):
                return T.And(index < stride, state_of(index) < self.task.num_rows * tile.group)

            def add_up(index):
                total = local((1,), "float32")
                put(total, T.float32(0), 0)
                with T.serial(team.slices) as s:
                    put(total, total[0] + arena[s * stride + index], 0)
                put(arena, total[0] * self.memory.factors[state_of(index)], index)

            def write(index):
                store(state_of(index), T.bind(T.truncmod(index, dim)), arena[index])

            def for_inside(body):
                for_threads(TEAMS * dim, self.thread, THREADS, lambda i: when(inside(i), lambda: body(i)))

            values.each(keep)
            sync()
            for_inside(add_up)
            sync()
            if rotated:
                rotate(arena, 0, TEAMS * dim, dim, self.thread, THREADS)
            for_inside(write)
            sync()

        with T.serial(tile.team_states) as turn:
            lot(turn)

    def finish(self, values: ValueSums) -> None:
        """Divide by the sums, undo the rotation of V, and write the rows of a task that was not split."""
        a, factors = self.a, self.memory.factors

        def factor(state):
            total = self.total(state)
            if a.sinks is None:
                put(factors, T.float32(1) / total, state)
                return
            peak, sink = T.bind(factors[state]), T.bind(a.sinks[self.query_place(state)[1]])
            now = T.bind(T.max(peak, sink))
            fade = T.bind(T.exp(peak - now))
            put(factors, fade / (total * fade + T.exp(sink - now)), state)

        def store(state, channel, value):
            put(a.out, T.cast(value, self.dtype), *self.query_place(state), channel)

        self.each_state(factor)
        sync()
        self.results(values, self.layout.v_bits is not None, store)

    def leave(self, values: ValueSums) -> None:
        """Leave the results of a split row in the scratch."""
        a, factors, dim = self.a, self.memory.factors, self.layout.head_dim
        slot, first_head = self.task.slot, T.bind(self.head * self.tile.group)

        def keep(state):
            put(a.scratch, factors[state], slot, first_head + state, dim)
            put(a.scratch, self.total(state), slot, first_head + state, dim + 1)
            put(factors, T.float32(1), state)

        def store(state, channel, value):
            put(a.scratch, value, slot, first_head + state, channel)

        self.each_state(keep)
        sync()
        self.results(values, False, store)


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
        a = attention_arguments(layout, num_heads, dtype, variant.sinks)
        with launch([layout.num_kv_heads, T.cast(a.num_tasks, "int32")], THREADS) as (head, at, thread):
            kernel = _Kernel(a, tile, dtype, variant)
            memory = Shared(
                shared((tile.arena_floats,), "float32"),
                shared((tile.states * LANES,), "float32"),
                shared((tile.states,), "float32"),
            )
            scales = KeyScales(layout, thread)
            when(at < a.counts[2], lambda: kernel.run(at, head, thread, memory, scales))
        merge_rows(a, layout, num_heads, dtype)
    return script.get()
