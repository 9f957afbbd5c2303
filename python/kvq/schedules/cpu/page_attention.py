"""Attention of a few rows to one page: scores, weights of its values, sums.

A page is walked in blocks of tokens that fit half of the first-level cache: the block's key codes become
float32 once, ``[D, tokens]``, for the scores of every row, tokens in lanes; when the page's weights are
known, the same buffer takes the block's value codes, ``[tokens, D]``, channels in lanes. Scales never touch
the codes: a row's query is multiplied by the keys' scales and its scores start at the query times the
minimums; its weights are multiplied by the values' scales, and the zero point of the codes is one number a
head. Rows that are not quantized have scale 1 and minimum 0.

A row sees the tokens ``first .. end - 1`` of a page (:data:`Span`). Where it sees none, because its window
begins later and the page is there for other rows, nothing changes, to the bit: it may as well be skipped.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from kvq.layout import KVLayout
from kvq.schedules.attention_variant import AttentionVariant
from kvq.schedules.statements import put, run

from .page_blocks import PageBlocks
from .row_ops import vector_lanes
from .vector import MASKED, CpuIsa, constant, exp, fma, prefetch, reduce_lanes, splat, tanh

#: First token of a page that a row sees, None for the page's first; and the one after the last.
Span = tuple[Any, Any]


class PageAttention:
    """Emits the statements, with the static geometry at hand."""

    def __init__(
        self, layout: KVLayout, num_heads: int, dtype: str, isa: CpuIsa, variant: AttentionVariant
    ) -> None:
        self.layout, self.num_heads, self.dtype, self.isa = layout, num_heads, dtype, isa
        self.variant = variant
        self.group = num_heads // layout.num_kv_heads
        self.dim, self.page = layout.head_dim, layout.page_size
        self.lanes = isa.lanes
        self.d_lanes = vector_lanes(self.dim, isa.lanes)
        registers = 32 if isa.lanes == 16 else 16
        #: query heads that run together, and the accumulators each of them then has
        self.heads = 3 if self.group % 3 == 0 else min(self.group, 2)
        self.width = max(1, (registers - 4) // self.heads)
        self.pages = PageBlocks(layout, isa)
        self.tokens = self.pages.tokens

    def width_for(self, vectors: int) -> int:
        """The largest divisor of ``vectors`` that fits the accumulators of one head."""
        return next(w for w in range(min(self.width, vectors), 0, -1) if vectors % w == 0)

    # ---- one row of one block ------------------------------------------------------------------
    def scale_query(self, q, row, head, scale, minimum, query, red) -> None:
        """``query[r, :D]``: a group's queries times the keys' scales; ``query[r, D]``: times the minimums."""
        lanes = self.d_lanes
        acc = T.sblock_alloc_buffer((lanes,), "float32")
        with T.serial(self.group) as r:
            put(acc, constant(0, lanes), run(0, lanes))
            with T.serial(self.dim // lanes) as j:
                at = run(j * lanes, lanes)
                value = T.bind(q[row, head + r, at])
                put(query, value * scale[at], r, at)
                put(acc, fma(value, minimum[at], acc[run(0, lanes)], lanes), run(0, lanes))
            put(query, reduce_lanes(lambda a, b: a + b, acc[run(0, lanes)], red, lanes), r, self.dim)

    def score(self, query, first, local, heads: int, buf, block: int, scores) -> None:
        """Scores of a block's keys for ``heads`` scaled queries from ``first``; ``local`` in the state."""
        lanes, tokens = self.lanes, self.tokens
        vectors = tokens // lanes
        width = self.width_for(vectors)
        for part in range(vectors // width):
            acc = T.sblock_alloc_buffer((heads, width, lanes), "float32")
            for r in range(heads):
                start = T.bind(splat(query[first + r, self.dim], lanes))
                for j in range(width):
                    put(acc, start, r, j, run(0, lanes))
            with T.serial(self.dim) as d:
                factor = [T.bind(splat(query[first + r, d], lanes)) for r in range(heads)]
                for j in range(width):
                    key = T.bind(buf[run(d * tokens + (part * width + j) * lanes, lanes)])
                    for r in range(heads):
                        put(acc, fma(factor[r], key, acc[r, j, run(0, lanes)], lanes), r, j, run(0, lanes))
            for r in range(heads):
                for j in range(width):
                    at = block * tokens + (part * width + j) * lanes
                    put(scores, acc[r, j, run(0, lanes)], local + r, run(at, lanes))

    def softmax(self, index, seen: Span, zero, scale, scores, red, state) -> None:
        """Turn the scores of a page into weights of its values, and bring the split state to their maximum.

        ``scale[P]`` are the values' scales, ``zero`` the code that stands for 0.
        """
        peak, sums, acc_out = state
        first, end = seen
        lanes, vectors = self.lanes, self.page // self.lanes

        def in_page(j):
            token = T.ramp(T.int32(j * lanes), 1, lanes)
            before_end = token < splat(end, lanes)
            return before_end if first is None else T.bitwise_and(before_end, token >= splat(first, lanes))

        most = None
        for j in range(vectors):
            at = run(j * lanes, lanes)
            if self.variant.softcap is not None:
                cap = self.variant.softcap
                ratio = scores[index, at] * constant(1 / cap, lanes)
                put(scores, tanh(ratio, lanes) * constant(cap, lanes), index, at)
            score = T.bind(T.Select(in_page(j), scores[index, at], constant(MASKED, lanes)))
            most = score if most is None else T.bind(T.max(most, score))
        before = T.bind(peak[index])
        now = T.bind(T.max(before, reduce_lanes(T.max, most, red, lanes)))
        put(peak, now, index)
        total = scaled_total = None
        for j in range(vectors):
            at = run(j * lanes, lanes)
            weight = exp(scores[index, at] - splat(now, lanes), lanes)
            weight = T.bind(T.Select(in_page(j), weight, constant(0, lanes)))
            scaled = T.bind(weight * scale[at])
            put(scores, scaled, index, at)
            total = weight if total is None else T.bind(total + weight)
            scaled_total = scaled if scaled_total is None else T.bind(scaled_total + scaled)
        fade = T.bind(exp(splat(before - now, lanes), lanes))
        put(sums, fma(sums[index, run(0, lanes)], fade, total, lanes), index, run(0, lanes))
        lanes = self.d_lanes
        fade = T.bind(exp(splat(before - now, lanes), lanes))
        all_scaled = reduce_lanes(lambda a, b: a + b, scaled_total, red, self.lanes)
        shift = T.bind(splat(T.float32(0) - all_scaled * zero, lanes))
        with T.serial(self.dim // lanes) as j:
            at = run(j * lanes, lanes)
            put(acc_out, fma(acc_out[index, at], fade, shift, lanes), index, at)

    def accumulate(self, local, heads: int, buf, block: int, seen: Span, scores, acc_out) -> None:
        """Add a block's values, weighted, to the split state of ``heads`` heads of one row."""
        lanes, vectors = self.d_lanes, self.dim // self.d_lanes
        width = self.width_for(vectors)
        first, (begin, end) = block * self.tokens, seen
        count = T.bind(T.min(end - first, self.tokens)) if self.tokens < self.page else end
        if begin is not None:
            begin = T.bind(T.max(begin - first, 0))
            count = T.bind(T.max(count - begin, 0))
        with T.serial(vectors // width) as part:
            acc = T.sblock_alloc_buffer((heads, width, lanes), "float32")
            for r in range(heads):
                for j in range(width):
                    put(acc, acc_out[local + r, run((part * width + j) * lanes, lanes)], r, j, run(0, lanes))
            with T.serial(count) as step:
                t = step if begin is None else step + begin
                weight = [T.bind(splat(scores[local + r, t + first], lanes)) for r in range(heads)]
                for j in range(width):
                    value = T.bind(buf[run(t * self.dim + (part * width + j) * lanes, lanes)])
                    for r in range(heads):
                        put(acc, fma(weight[r], value, acc[r, j, run(0, lanes)], lanes), r, j, run(0, lanes))
            for r in range(heads):
                for j in range(width):
                    put(acc_out, acc[r, j, run(0, lanes)], local + r, run((part * width + j) * lanes, lanes))

    def for_heads(self, body) -> None:
        """Emit ``body(first, count)`` over the group's query heads, a block of them at a time."""
        with T.serial(self.group // self.heads) as b:
            body(b * self.heads, self.heads)
        if self.group % self.heads:
            body(self.group // self.heads * self.heads, self.group % self.heads)

    def load_scales(self, is_own, pool, unit, following, pairs, k_scale, k_minimum, v_scale) -> None:
        """Scales and minimums of a page, 1 and 0 where it has none. Asks for the page that follows."""
        layout, pages = self.layout, self.pages
        with T.If(is_own):
            with T.Then():
                pages.fill(k_scale, self.dim, 1.0)
                pages.fill(k_minimum, self.dim, 0.0)
                pages.fill(v_scale, self.page, 1.0)
            with T.Else():
                prefetch(pool, following, layout.unit_words)
                if layout.k_bits is None:
                    pages.fill(k_scale, self.dim, 1.0)
                    pages.fill(k_minimum, self.dim, 0.0)
                else:
                    pages.load_key_scales(pool, unit, k_scale, k_minimum)
                if len(layout.k_classes) > 1:
                    pages.load_key_pairs(pool, unit, pairs)
                if layout.v_bits is None:
                    pages.fill(v_scale, self.page, 1.0)
                else:
                    pages.load_value_scales(pool, unit, v_scale)

    def attend(self, load, zero, rows, q, head, buffers, state) -> None:
        """Add one page to the split state of every row of the task.

        ``load(part, block)`` fills the buffer with keys (part 0) or values; the scales are there; ``zero`` is
        the value code that stands for 0. ``rows`` is (number, first row, the :data:`Span` of row ``i``).
        """
        num_rows, first_row, span = rows
        buf, k_scale, k_minimum, v_scale, query, scores, red = buffers
        group = self.group
        for block in range(self.page // self.tokens):
            load(0, block)
            with T.serial(num_rows) as i:
                self.scale_query(q, first_row + i, head * group, k_scale, k_minimum, query, red)
                self.for_heads(
                    lambda first, count, i=i, block=block: self.score(
                        query, first, i * group + first, count, buf, block, scores
                    )
                )
        with T.serial(num_rows) as i:
            seen = span(i)
            with T.serial(group) as r:
                self.softmax(T.bind(i * group + r), seen, zero, v_scale, scores, red, state)
        for block in range(self.page // self.tokens):
            load(1, block)
            with T.serial(num_rows) as i:
                seen = span(i)
                self.for_heads(
                    lambda first, count, i=i, block=block, seen=seen: self.accumulate(
                        i * group + first, count, buf, block, seen, scores, state[2]
                    )
                )
