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

from .block import sync


def _add(a, b):
    """The sum, rounded by itself: nothing is contracted into it."""
    return T.call_extern("float32", "__fadd_rn", a, b)


def _mul(a, b):
    """The product, rounded by itself."""
    return T.call_extern("float32", "__fmul_rn", a, b)


class KeyWidths(BlockKeyWidths):
    """The choice for a page of one KV head."""

    def __init__(self, layout: KVLayout, num_heads: int, thread, threads: int) -> None:
        super().__init__(layout)
        self.group, self.thread, self.threads = num_heads // layout.num_kv_heads, thread, threads
        if self.mixed:
            self.weight = T.alloc_shared((self.half,), "float32")
            # and a pair's place among those that are stored
            self.kind, self.place = (T.alloc_shared((self.half,), "int32") for _ in range(2))

    def choose(self, q, row, head, spread) -> None:
        """Decide, from the ranges ``spread[D]`` and the queries at ``row``: with all threads of the block."""
        if not self.mixed:
            return
        half = self.half
        wide, middle, _ = (channels // 2 for _, channels in self.layout.k_classes)

        def weigh(p):
            energy = T.float32(0)
            for g in range(self.group):
                first, second = (T.bind(q[row, head * self.group + g, p + i * half]) for i in range(2))
                energy = T.bind(_add(energy, _add(_mul(first, first), _mul(second, second))))
            energy = T.Select(energy <= T.float32(MAX_ENERGY), energy, T.float32(0))
            first, second = T.bind(spread[p]), T.bind(spread[p + half])
            ranges = _add(_mul(first, first), _mul(second, second))
            put(self.weight, _mul(ranges, T.call_extern("float32", "__fsqrt_rn", energy)), p)

        def rank(p):
            own, before = T.bind(self.weight[p]), T.alloc_local((1,), "int32")
            put(before, T.int32(0), 0)
            with T.serial(half) as other:
                weight = T.bind(self.weight[other])
                heavier = T.Or(weight > own, T.And(weight == own, other < p))
                put(before, before[0] + T.Select(heavier, T.int32(1), T.int32(0)), 0)
            kind = T.Select(before[0] < wide, T.int32(0), T.Select(before[0] < wide + middle, 1, 2))
            put(self.kind, kind, p)

        def place(p):
            own, before = T.bind(self.kind[p]), T.alloc_local((1,), "int32")
            put(before, T.Select(own == 0, T.int32(0), T.Select(own == 1, wide, wide + middle)), 0)
            with T.serial(p) as other:
                put(before, before[0] + T.Select(self.kind[other] == own, T.int32(1), T.int32(0)), 0)
            put(self.place, before[0], p)

        for step in (weigh, rank, place):
            for_threads(half, self.thread, self.threads, step)
            sync()

    def stored(self, channel):
        """Where a channel stands among the codes."""
        pair = T.truncmod(channel, self.half)
        return (self.place[pair] if self.mixed else pair) * 2 + T.truncdiv(channel, self.half)
