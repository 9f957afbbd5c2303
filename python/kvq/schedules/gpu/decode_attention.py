"""paged_attention of a decode step: a workgroup has a row, the heads of a group, and several pages at once.

:mod:`.decode_tile` says who does what. Of its page each crew makes scores (:mod:`.page_keys`), weights, and
sums of values (:mod:`.page_values`), with an online softmax of its own; seven barriers serve for all crews.
At the end the crews' results are merged. What a row's splits leave in ``attention_scratch`` is merged by a
second launch (:mod:`.attention_merge`).
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.schedules.attention_variant import AttentionVariant
from kvq.schedules.cache_arguments import AttentionArguments, attention_arguments
from kvq.schedules.statements import for_threads, put, when

from .attention_merge import merge_rows
from .attention_task import each_own, own_end, read_task
from .block import ATTRIBUTES, add, either, held, launch, load_run, local, shared, sync
from .decode_queries import PageQueries
from .decode_reduce import CrewReduction
from .decode_tile import CREW, Crew, DecodeTile
from .hadamard import rotate
from .halves import half_of, half_to_float
from .page_codes import one_bits
from .page_keys import KeyScores
from .page_softmax import MASKED, capped
from .page_values import ValueSums


class _Kernel:
    """The statements of a workgroup."""

    def __init__(
        self, a: AttentionArguments, tile: DecodeTile, dtype: str, variant: AttentionVariant, thread: Any
    ) -> None:
        self.a, self.tile, self.layout, self.dtype, self.variant = a, tile, tile.layout, dtype, variant
        self.thread, self.crew, self.heads = thread, Crew(tile, thread), range(tile.heads)
        self.reduction = CrewReduction(tile, self.crew)
        self.arena = shared((tile.arena,), "float32")
        self.peaks, self.factors = (shared((tile.crews * tile.heads,), "float32") for _ in range(2))
        self.peak, self.total = (local((tile.heads,), "float32") for _ in range(2))
        self.fades = local((tile.heads,), "float32")

    def run(self, at, kv_head) -> None:
        """One task of one KV head."""
        a, tile, crew = self.a, self.tile, self.crew
        self.task, self.kv_head = read_task(a, self.layout, self.variant, at), kv_head
        self.queries = PageQueries(tile, crew, self._query, self.reduction, self.arena)
        one = one_bits(a.counts[2])
        keys = KeyScores(self.layout, crew, self.queries, tile.heads, self.queries.at, one)
        values = ValueSums(self.layout, crew.member, CREW, tile.heads, self._weights_of, one)
        for i in self.heads:
            put(self.peak, T.float32(MASKED), i)
            put(self.total, T.float32(0), i)
        values.clear()
        first = held(self.task.begin + crew.slot)
        self._gather(first)
        sync()
        self._prepare(first)
        sync()
        steps = T.bind(T.truncdiv(self.task.end - self.task.begin + (tile.pages - 1), tile.pages))
        with T.serial(steps) as step:
            self._pages(held(first + step * tile.pages), keys, values)
        self._finish(values)

    def _query(self, head, channel):
        """A number of a query of the block; of heads beyond the group, the last one's."""
        index = self.crew.block * self.tile.heads + head
        if self.tile.group % self.tile.heads:
            index = T.min(index, self.tile.group - 1)
        return self.a.q[self.task.first_row, self.kv_head * self.tile.group + index, channel]

    def _unit(self, index):
        return T.bind(self.a.table[self.task.table + index]), self.a.layer, self.kv_head

    def _gather(self, index) -> None:
        """First step towards a page: what it says of its keys. A barrier must follow."""
        if self.queries.quantized:
            when(
                index < self.task.sealed_end,
                lambda: self.queries.header.gather(self.a.pool, self._unit(index)),
            )

    def _prepare(self, index) -> None:
        """Second step: the queries for it. A barrier must follow."""
        if not self.queries.quantized:
            self.queries.plain()
            return

        def rows():
            self.queries.plain()
            self.queries.no_offsets()

        either(
            index < self.task.sealed_end,
            self.queries.scaled,
            lambda: when(index < self.task.end, rows),
        )

    def _pages(self, index, keys: KeyScores, values: ValueSums) -> None:
        """A page of each crew, and the preparation of the one after."""
        a, task, layout = self.a, self.task, self.layout
        sealed, following = T.bind(index < task.sealed_end), held(index + self.tile.pages)
        own = T.bind(T.And(index == task.own_page, index < task.end))
        tokens = self._own_tokens(keys)
        scale = local((len(tokens),), "float32")

        def read_sealed():
            where = self._unit(index)
            keys.add_page(a.pool, where)
            if layout.v_bits is not None:
                for j, token in enumerate(tokens):
                    word = a.pool[(*where, T.shift_right(token, 1) + layout.v_scale_offset)]
                    put(scale, half_to_float(half_of(word, token)), j)

        keys.clear()
        for j in range(len(tokens)):
            put(scale, T.float32(1), j)
        either(
            sealed,
            read_sealed,
            lambda: when(
                own, lambda: each_own(a, task, self.kv_head, lambda row: keys.add_rows(lambda i: row(0, i)))
            ),
        )
        if self.queries.quantized:
            sync()  # the queries give their place to scores
            self.reduction.combine(add)
        self._hand_over(keys)
        sync()
        scores = self._scores(index, sealed, own, keys, tokens)
        self._gather(following)
        sync()
        self.reduction.combine(T.max)
        sync()
        when(sealed, lambda: values.fetch(a.pool, self._unit(index)))
        self._weigh(scores, scale, tokens)
        sync()
        values.fade([T.bind(self.fades[i]) for i in self.heads])
        end = own_end(a, layout, task)
        either(
            sealed,
            lambda: values.add_page(a.pool, self._unit(index)),
            lambda: when(
                own,
                lambda: each_own(
                    a, task, self.kv_head, lambda row: values.add_rows(lambda i: row(1, i), end)
                ),
            ),
        )
        sync()
        if self.queries.quantized:
            self._prepare(following)
            sync()

    def _place(self, token):
        """Where a token's scores and weights stand in the arena."""
        return self.tile.weights_start(self.crew) + token * self.tile.heads

    def _weights_of(self, token) -> list:
        return load_run(self.arena, self._place(token), self.tile.heads)

    def _own_tokens(self, keys: KeyScores) -> list:
        """The tokens of whose scores the thread makes weights: half of those that it has sums for."""
        half = keys.tokens // 2
        return [held(T.Select(self.crew.team == 0, keys.token(j), keys.token(half + j))) for j in range(half)]

    def _hand_over(self, keys: KeyScores) -> None:
        """Give the other team the sums of its tokens."""
        half, first = keys.tokens // 2, self.crew.team == 0
        for j in range(half):
            token = held(T.Select(first, keys.token(half + j), keys.token(j)))
            for i in self.heads:
                value = T.Select(first, keys.scores[half + j, i], keys.scores[j, i])
                put(self.arena, value, self._place(token) + i)

    def _scores(self, index, sealed, own, keys: KeyScores, tokens: list) -> Any:
        """The scores of the thread's tokens, whole; their maximum is offered."""
        page, task = self.layout.page_size, self.task
        half, scores = len(tokens), local((len(tokens), self.tile.heads), "float32")
        position = T.bind(self.a.positions[task.first_row])
        end = held(T.Select(sealed, page, T.Select(own, T.bitwise_and(position, page - 1) + 1, 0)))
        offsets = self.reduction.result(add) if self.queries.quantized else [T.float32(0)] * self.tile.heads
        most = [T.float32(MASKED)] * self.tile.heads
        for j, token in enumerate(tokens):
            visible = token < end
            if self.variant.window is not None:
                visible = T.And(visible, token >= position - (self.variant.window - 1) - index * page)
            others = self._weights_of(token)
            for i in self.heads:
                mine = T.Select(self.crew.team == 0, keys.scores[j, i], keys.scores[half + j, i])
                score = T.bind(mine + others[i] + offsets[i])
                if self.variant.softcap is not None:
                    score = capped(score, self.variant.softcap)
                score = held(T.Select(visible, score, T.float32(MASKED)), "float32")
                put(scores, score, j, i)
                most[i] = held(T.max(most[i], score), "float32")
        self.reduction.offer(most)
        return scores

    def _weigh(self, scores, scale, tokens: list) -> None:
        """Weights of the thread's tokens, times the values' scales; and what sums fade by."""
        page_peak = self.reduction.result(T.max)
        for i in self.heads:
            now = held(T.max(self.peak[i], page_peak[i]), "float32")
            put(self.fades, T.exp(self.peak[i] - now), i)
            put(self.peak, now, i)
            put(self.total, self.total[i] * self.fades[i], i)
            for j, token in enumerate(tokens):
                # where a row sees nothing, the maximum is a masked score
                weight = T.Select(scores[j, i] > T.float32(MASKED), T.exp(scores[j, i] - now), T.float32(0))
                weight = held(weight, "float32")
                put(self.total, self.total[i] + weight, i)
                put(self.arena, weight * scale[j], self._place(token) + i)

    def _finish(self, values: ValueSums) -> None:
        """Merge the crews and write the row: divided by its sums, the rotation of V undone.

        Of a row that was split, the results go to the scratch as they are.
        """
        a, tile, crew, task, dim = self.a, self.tile, self.crew, self.task, self.layout.head_dim
        sums, whole = self.arena, T.bind(task.slot < 0)
        first = held(crew.index * tile.heads)

        def keep(i, k):
            channel = values.channel(k)
            when(channel < dim, lambda: put(sums, values.sums[i, k], (first + i) * dim + channel))

        values.each(keep)
        for i in self.heads:
            when(crew.member == 0, lambda i=i: put(self.peaks, self.peak[i], first + i))
        self.reduction.offer([self.total[i] for i in self.heads])
        sync()
        self.reduction.combine(add)
        sync()

        def merge(head):
            """Of one query head: its peak and sum over the crews, and their factors."""
            crews = [held(head + page * tile.blocks * tile.heads) for page in range(tile.pages)]
            most = self.peaks[crews[0]]
            for place in crews[1:]:
                most = held(T.max(most, self.peaks[place]), "float32")
            query = held(self.kv_head * tile.group + head)
            sink = T.bind(a.sinks[query]) if a.sinks is not None else None
            limit = T.bind(most) if sink is None else T.bind(T.Select(whole, T.max(most, sink), most))
            total = T.float32(0)
            fades = [held(T.exp(self.peaks[place] - limit), "float32") for place in crews]
            for place, fade in zip(crews, fades, strict=True):
                total = held(total + fade * self.reduction.sum_at(place), "float32")

            def divide():
                every = total if sink is None else total + T.exp(sink - limit)
                for place, fade in zip(crews, fades, strict=True):
                    put(self.factors, fade / every, place)

            def leave():
                put(a.scratch, limit, task.slot, query, dim)
                put(a.scratch, total, task.slot, query, dim + 1)
                for place, fade in zip(crews, fades, strict=True):
                    put(self.factors, fade, place)

            either(whole, divide, leave)

        when(self.thread < tile.group, lambda: merge(self.thread))
        sync()

        def add_up(index):
            head = held(T.truncdiv(index, dim))
            value = T.float32(0)
            for page in range(tile.pages):
                place = head + page * tile.blocks * tile.heads
                value = held(
                    value + self.factors[place] * sums[index + page * tile.blocks * tile.heads * dim],
                    "float32",
                )
            put(sums, value, index)

        def write(index):
            head, channel = held(T.truncdiv(index, dim)), held(T.truncmod(index, dim))
            query, value = held(self.kv_head * tile.group + head), T.bind(sums[index])
            either(
                whole,
                lambda: put(a.out, T.cast(value, self.dtype), task.first_row, query, channel),
                lambda: put(a.scratch, value, task.slot, query, channel),
            )

        for_threads(tile.group * dim, self.thread, tile.threads, add_up)
        sync()
        if self.layout.v_bits is not None:
            when(whole, lambda: rotate(sums, 0, tile.group * dim, dim, self.thread, tile.threads))
        for_threads(tile.group * dim, self.thread, tile.threads, write)


def decode_attention(
    tile: DecodeTile, num_heads: int, dtype: str, variant: AttentionVariant
) -> tirx.PrimFunc:
    """Build the kernel; the layout is in the order ``lanes``.

    Arguments of the kernel: :func:`kvq.schedules.cache_arguments.attention_arguments`.
    Every task has one row.
    One workgroup for each entry of the list of tasks and KV head, then one for each entry of the list of
    merges and query head; those beyond the counts have nothing to do.
    """
    layout = tile.layout
    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        a = attention_arguments(layout, num_heads, dtype, variant.sinks, rows="int32")
        grid = [layout.num_kv_heads, T.cast(a.num_tasks, "int32")]
        with launch(grid, tile.threads) as (kv_head, at, thread):
            kernel = _Kernel(a, tile, dtype, variant, thread)
            when(at < a.counts[2], lambda: kernel.run(at, kv_head))
        merge_rows(a, layout, num_heads, dtype)
    return script.get()
