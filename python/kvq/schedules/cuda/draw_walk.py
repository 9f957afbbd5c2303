"""The id that is drawn of what a draw keeps: that at which the masses, in the order of ids, pass a point.

Warps take segments, the one that holds the point is divided again, and what is left is looked at one by one.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from kvq.runtime.philox import KEY_INCREMENTS, MULTIPLIERS, ROUNDS
from kvq.schedules.statements import for_threads, put, when

from .block import WARP, reduce_warp, sync
from .draw_row import CHOSEN, POINT, THREADS, TIES, WARPS, Row, mass_of, sum_warp


def draw_id(row: Row, out: Any) -> None:
    """Find the id before which the kept mass is no more than the point, and past which it is."""
    segment = T.alloc_local((2,), "int32")  # first id, and the one behind the last
    put(segment, T.int32(0), 0)
    put(segment, T.int32(row.drawable), 1)
    width, tie = row.drawable, mass_of(row.limit[0])
    for first in (True, False):
        width = -(-width // THREADS) * WARP
        _sum_segments(row, segment, width)
        sync()
        when(row.thread == 0, lambda first=first, tie=tie: _choose_segment(row, tie, first))
        sync()
        put(segment, segment[0] + row.places[CHOSEN] * width, 0)
        put(segment, T.min(segment[0] + width, segment[1]), 1)
    keys = T.alloc_shared((width,), "int32")
    for_threads(
        width,
        row.thread,
        THREADS,
        lambda i: when(
            segment[0] + i < segment[1],
            lambda: put(keys, row.bits(row.logits[row.row, segment[0] + i]), i),
        ),
    )
    sync()

    def step(i):
        bits = T.bind(keys[i])
        is_tie = T.bind(T.And(bits == row.limit[0], row.places[TIES] > 0))

        def keep():
            mass, point = T.bind(mass_of(bits)), T.bind(row.numbers[POINT])
            when(T.And(point >= 0, point < mass), lambda: put(out, segment[0] + i, row.row))
            put(row.numbers, point - mass, POINT)  # below 0 once it was found

        when(T.Or(bits > row.limit[0], is_tie), keep)
        when(is_tie, lambda: put(row.places, row.places[TIES] - 1, TIES))

    def one_by_one():
        with T.serial(segment[1] - segment[0]) as i:
            step(i)

    when(row.thread == 0, one_by_one)


def _sum_segments(row: Row, segment: Any, width: int) -> None:
    """Each warp's mass above the limit, and number of ids at it, in its ``width`` ids of the segment."""
    mass, ties = T.alloc_local((1,), "int64"), T.alloc_local((1,), "int32")
    put(mass, T.int64(0), 0)
    put(ties, T.int32(0), 0)
    start = T.bind(segment[0] + row.warp * width + row.lane)
    end = T.bind(T.min(segment[0] + (row.warp + 1) * width, segment[1]))

    def look(_, logit):
        bits = row.bits(logit)
        put(mass, mass[0] + T.Select(bits > row.limit[0], mass_of(bits), T.int64(0)), 0)
        put(ties, ties[0] + T.cast(bits == row.limit[0], "int32"), 0)

    row.each(start, WARP, width // WARP, end, look)
    total = sum_warp(mass[0])
    count = reduce_warp(lambda a, b: a + b, ties[0])

    def share():
        put(row.sums, total, row.warp)
        put(row.counts, count, row.warp)

    when(row.lane == 0, share)


def _choose_segment(row: Row, tie: Any, first: bool) -> None:
    """The warp whose ids hold the point; for one thread. ``tie`` is the mass of an id at the limit."""
    left, chosen = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
    point = T.alloc_local((1,), "int64")

    def kept(i):
        ties = T.bind(T.min(left[0], row.counts[i]))
        return ties, T.bind(row.sums[i] + T.cast(ties, "int64") * tie)

    if first:
        put(left, row.limit[1], 0)
        put(point, T.int64(0), 0)
        with T.serial(WARPS) as i:
            ties, mass = kept(i)
            put(point, point[0] + mass, 0)
            put(left, left[0] - ties, 0)
        total = T.bind(T.cast(point[0], "float64"))
        before = T.cast(_uniform(row) * total, "int64")
        put(point, T.min(before, point[0] - 1), 0)
        put(left, row.limit[1], 0)
    else:
        put(point, row.numbers[POINT], 0)
        put(left, row.places[TIES], 0)
    put(chosen, T.int32(-1), 0)
    with T.serial(WARPS) as i:
        ties, mass = kept(i)

        def skip():
            put(point, point[0] - mass, 0)
            put(left, left[0] - ties, 0)

        with T.If(chosen[0] < 0), T.Then(), T.If(point[0] < mass):
            with T.Then():
                put(chosen, i, 0)
            with T.Else():
                skip()
    put(row.places, chosen[0], CHOSEN)
    put(row.places, left[0], TIES)
    put(row.numbers, point[0], POINT)


def _uniform(row: Row) -> Any:
    """:func:`kvq.runtime.philox.uniform` of the row's seed, choice and position, float64."""
    key, counter = T.alloc_local((2,), "uint32"), T.alloc_local((4,), "uint32")
    for i in range(2):
        put(key, T.reinterpret("uint32", row.fields[4 + i]), i)
        put(counter, T.reinterpret("uint32", row.fields[7 - i]), i)  # position, choice
        put(counter, T.uint32(0), 2 + i)
    with T.serial(ROUNDS):
        words = [T.bind(counter[i]) for i in range(4)]
        for i in range(2):
            product = T.bind(T.cast(words[2 * i], "uint64") * T.uint64(MULTIPLIERS[i]))
            high = T.cast(T.shift_right(product, T.uint64(32)), "uint32")
            put(counter, T.bitwise_xor(T.bitwise_xor(high, words[3 - 2 * i]), key[1 - i]), 2 - 2 * i)
            put(counter, T.cast(product, "uint32"), 3 - 2 * i)
        for i in range(2):
            put(key, key[i] + T.uint32(KEY_INCREMENTS[i]), i)
    high = T.cast(T.shift_right(counter[0], T.uint32(5)), "float64") * T.float64(2.0**26)
    low = T.cast(T.shift_right(counter[1], T.uint32(6)), "float64")
    return (high + low) / T.float64(2.0**53)
