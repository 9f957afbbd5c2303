"""Widths of a page's key channels where they are mixed: who gets which, and where their codes lie.

The statements of :func:`kvq.quantization.kv_codec.key_widths`, operation by operation, a thread a pair of
channels.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.layout import KVLayout
from kvq.quantization.kv_codec import MAX_ENERGY
from kvq.schedules.key_widths import BlockKeyWidths
from kvq.schedules.statements import for_threads, put

from .block import held, local, shared, sync


class KeyWidths(BlockKeyWidths):
    """The choice for a page of one KV head."""

    def __init__(self, layout: KVLayout, group: int, thread, threads: int) -> None:
        super().__init__(layout)
        self.group, self.thread, self.threads = group, thread, threads
        if self.mixed:
            self.weight = shared((self.half,), "float32")
            # and the pairs in the order in which they are stored
            self.kind, self.pairs = (shared((self.half,), "int32") for _ in range(2))

    def choose(self, q, row, head, spread) -> None:
        """Decide, from the ranges ``spread[D]`` and the queries at ``row``, between barriers."""
        if not self.mixed:
            return
        half = self.half
        wide, middle, _ = (channels // 2 for _, channels in self.layout.k_classes)

        def weigh(p):
            energy = local((1,), "float32")
            put(energy, T.float32(0), 0)
            with T.serial(self.group) as g:
                first, second = (T.bind(q[row, head * self.group + g, p + i * half]) for i in range(2))
                put(energy, energy[0] + T.bind(first * first + second * second), 0)
            kept = T.Select(energy[0] <= T.float32(MAX_ENERGY), energy[0], T.float32(0))
            first, second = T.bind(spread[p]), T.bind(spread[p + half])
            put(self.weight, T.bind(first * first + second * second) * T.sqrt(T.bind(kept)), p)

        def count(end, condition):
            """How many pairs below ``end`` meet a condition."""
            found = local((1,), "int32")
            put(found, 0, 0)
            with T.serial(end) as other:
                put(found, found[0] + T.Select(condition(other), 1, 0), 0)
            return found[0]

        def rank(p):
            own = T.bind(self.weight[p])

            def before(other):
                weight = T.bind(self.weight[other])
                return T.Or(weight > own, T.And(weight == own, other < p))

            place = held(count(half, before))
            put(self.kind, T.Select(place < wide, 0, T.Select(place < wide + middle, 1, 2)), p)

        def list_pair(p):
            own = held(self.kind[p])
            place = count(p, lambda other: self.kind[other] == own)
            first = T.Select(own == 0, 0, T.Select(own == 1, wide, wide + middle))
            put(self.pairs, p, held(place + first))

        for step in (weigh, rank, list_pair):
            for_threads(half, self.thread, self.threads, step)
            sync()

    def channel(self, stored):
        """The channel that stands at a place among the codes."""
        if not self.mixed:
            return stored
        return self.pairs[T.shift_right(stored, 1)] + T.bitwise_and(stored, 1) * self.half
