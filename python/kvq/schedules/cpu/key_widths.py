"""Widths of a page's key channels where they are mixed: who gets which, and where their codes lie.

The statements of :func:`kvq.quantization.kv_codec.key_widths`, operation by operation.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.layout import KVLayout
from kvq.quantization.kv_codec import MAX_ENERGY
from kvq.schedules.statements import put, run

from .row_ops import vector_lanes
from .vector import splat


def _energy_root(q, row, head, pair: int, layout: KVLayout, num_heads: int):
    """Root of the energy of a pair of channels in the queries of KV head ``head`` at ``row``."""
    group, half = num_heads // layout.num_kv_heads, layout.head_dim // 2
    energy = T.float32(0)
    for g in range(group):
        first, second = (T.bind(q[row, head * group + g, pair + i * half]) for i in range(2))
        energy = T.bind(energy + T.bind(first * first + second * second))
    return T.sqrt(T.Select(energy <= T.float32(MAX_ENERGY), energy, T.float32(0)))


def _rank(weight, at, half: int, lanes: int):
    """How many pairs come before pair ``at``: heavier ones, and as heavy ones of lower number."""
    own = T.bind(splat(weight[at], lanes))
    count = T.sblock_alloc_buffer((lanes,), "int32")
    put(count, splat(T.int32(0), lanes), run(0, lanes))
    with T.serial(half // lanes) as j:
        other = T.bind(weight[run(j * lanes, lanes)])
        tied = T.bitwise_and(other == own, run(j * lanes, lanes) < splat(at, lanes))
        before = T.Select(T.bitwise_or(other > own, tied), splat(T.int32(1), lanes), splat(T.int32(0), lanes))
        put(count, count[run(0, lanes)] + before, run(0, lanes))
    total = count[0]
    for i in range(1, lanes):
        total = total + count[i]
    return T.bind(total)


class KeyWidths:
    """Emits the choice for a page of one KV head."""

    def __init__(self, layout: KVLayout, num_heads: int) -> None:
        self.layout, self.num_heads = layout, num_heads
        self.half = layout.head_dim // 2

    def choose(self, q, row, head, spread, levels, order, header) -> None:
        """From the ranges ``spread[D]``: ``levels[D]``, ``order[D]`` (stored to channel) and the header."""
        layout, half = self.layout, self.half
        lanes = vector_lanes(half, 8)
        weight = T.sblock_alloc_buffer((half,), "float32")
        count = T.sblock_alloc_buffer((len(layout.k_classes),), "int32")
        with T.serial(half) as p:
            ranges = T.bind(spread[p] * spread[p]) + T.bind(spread[p + half] * spread[p + half])
            put(weight, ranges * _energy_root(q, row, head, p, layout, self.num_heads), p)
        for i in range(len(layout.k_classes)):
            put(count, T.int32(0), i)
        with T.serial(half) as p:
            rank = _rank(weight, p, half, lanes)
            end = start = 0
            for i, (bits, channels) in enumerate(layout.k_classes):
                start, end = end, end + channels // 2
                with T.If(T.And(rank >= start, rank < end)), T.Then():
                    at = T.bind((count[i] + start) * 2)
                    for part in range(2):
                        put(order, T.cast(p, "int32") + part * half, at + part)
                        put(levels, T.float32(2**bits - 1), p + part * half)
                    put(count, count[i] + 1, i)
            wide, narrow = layout.k_classes[0][1] // 2, layout.k_classes[-1][1] // 2
            put(header, T.cast(rank < wide, "uint32"), p)
            put(header, T.cast(rank >= half - narrow, "uint32"), p + half)
