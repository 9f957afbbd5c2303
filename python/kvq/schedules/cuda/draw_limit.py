"""What a draw keeps of a row: top-k, top-p and min-p as one limit of the weights' bits.

The limit is found digit by digit from the top of the bits (a float that is not negative compares as an
integer), by a histogram of numbers or masses. Masses are integers and their sums exact, so the order in which
threads add is of no account.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from kvq.schedules.statements import put, when

from .block import WARP, sync
from .draw_row import ABOVE, BINS, CHOSEN, PART_BITS, PARTS, TARGET, WARPS, Row, mass_of, sum_warp

#: Digits of a weight's bits, which are below 2^30; a bin for each value of one.
_DIGITS, _DIGIT_BITS = 3, 10
_EVERY_TIE = 0x7FFFFFFF


def find_limit(row: Row) -> None:
    """Find :attr:`Row.limit`."""
    top_k, top_p = row.fields[1], T.bind(T.reinterpret("float32", row.fields[2]))
    put(row.limit, row.fields[3], 0)  # min_p is a weight itself
    put(row.limit, T.int32(_EVERY_TIE), 1)
    when(
        T.And(top_k > 0, top_k < row.drawable),
        lambda: _select(row, lambda _: T.int64(1), lambda _: T.cast(top_k, "int64")),
    )

    def enough(total):
        part = T.ceil(T.cast(top_p, "float64") * T.cast(total, "float64"))
        return T.min(T.cast(part, "int64"), total)

    when(top_p < T.float32(1), lambda: _select(row, mass_of, enough))


def _select(row: Row, amount: Callable[[Any], Any], target: Callable[[Any], Any]) -> None:
    """Lower :attr:`Row.limit` to the fewest of the likeliest ids whose amounts reach the target."""
    found = T.alloc_local((1,), "int32")
    put(found, T.int32(0), 0)
    for digit in reversed(range(_DIGITS)):
        shift = digit * _DIGIT_BITS
        for part in range(PARTS):
            put(row.bins, T.uint32(0), part, row.thread)
        sync()

        def add(_, logit, shift=shift):
            bits = row.bits(logit)
            bin_ = T.bitwise_and(T.shift_right(bits, shift), T.int32(BINS - 1))
            here = T.shift_right(bits, shift + _DIGIT_BITS) == found[0]
            when(here, lambda: _add_to(row, bin_, T.bind(amount(bits))))

        row.each_id(add)
        sync()
        total = sum_warp(_bin(row, row.thread))
        when(row.lane == 0, lambda total=total: put(row.sums, total, row.warp))
        sync()
        when(row.thread == 0, lambda digit=digit: _choose_bin(row, target, digit == _DIGITS - 1))
        sync()
        put(found, T.bitwise_or(T.shift_left(found[0], _DIGIT_BITS), row.places[CHOSEN]), 0)
    one = T.bind(amount(found[0]))
    missing = row.numbers[TARGET] - row.numbers[ABOVE]
    ties = T.bind(T.cast(T.truncdiv(missing + (one - 1), one), "int32"))
    old = T.bind(row.limit[0])

    def lower():
        put(row.limit, T.Select(found[0] == old, T.min(row.limit[1], ties), ties), 1)
        put(row.limit, found[0], 0)

    when(found[0] >= old, lower)


def _add_to(row: Row, bin_: Any, amount: Any) -> None:
    for part in range(PARTS):
        piece = T.shift_right(amount, T.int64(part * PART_BITS))
        if part < PARTS - 1:
            piece = T.bitwise_and(piece, T.int64((1 << PART_BITS) - 1))
        piece = T.bind(T.cast(piece, "uint32"))
        when(
            piece != T.uint32(0),
            lambda part=part, piece=piece: T.evaluate(
                T.cuda.atomic_add(T.address_of(row.bins[part, bin_]), piece)
            ),
        )


def _bin(row: Row, index: Any) -> Any:
    """The amount in a bin."""
    pieces = [
        T.shift_left(T.cast(row.bins[part, index], "int64"), T.int64(part * PART_BITS))
        for part in range(PARTS)
    ]
    return T.bind(pieces[0] + pieces[1] + pieces[2])


def _choose_bin(row: Row, target: Callable[[Any], Any], first: bool) -> None:
    """The bin in which the amounts, from the top, reach the target; for one thread."""
    if first:
        total = T.alloc_local((1,), "int64")
        put(total, T.int64(0), 0)
        with T.serial(WARPS) as i:
            put(total, total[0] + row.sums[i], 0)
        put(row.numbers, target(total[0]), TARGET)
        put(row.numbers, T.int64(0), ABOVE)
    group = _last_that_reaches(row.numbers, WARPS, lambda i: row.sums[i])
    put(
        row.places,
        group * WARP + _last_that_reaches(row.numbers, WARP, lambda i: _bin(row, group * WARP + i)),
        CHOSEN,
    )


def _last_that_reaches(numbers: Any, count: int, amount: Callable[[Any], Any]) -> Any:
    """The index, from ``count`` down, whose amount brings what is above it to the target.

    What is above the index is then in ``numbers``.
    """
    chosen = T.alloc_local((1,), "int32")
    put(chosen, T.int32(-1), 0)
    with T.serial(count) as i:
        index = T.bind(count - 1 - i)
        with T.If(chosen[0] < 0), T.Then():
            above = T.bind(numbers[ABOVE] + amount(index))
            with T.If(above >= numbers[TARGET]):
                with T.Then():
                    put(chosen, index, 0)
                with T.Else():
                    put(numbers, above, ABOVE)
    return T.bind(chosen[0])
