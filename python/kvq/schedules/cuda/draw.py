"""Draws a token from each row of logits, so that a step copies one number a row to the host.

A block a row. The draw is :func:`kvq.runtime.sampler.draw`, without a sort: top-k and top-p are a threshold
each, found digit by digit from the top of the weights' bits (a float that is not negative compares as an
integer), by a histogram of numbers or masses. Masses are integers and their sums exact, so the order in which
threads add is of no account. Then the ids are walked in order: warps take segments, the one that holds the
point is divided again, and what is left is looked at one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from kvq.runtime.philox import KEY_INCREMENTS, MULTIPLIERS, ROUNDS
from kvq.runtime.sampler import DRAW_FIELDS, MASS_BITS
from kvq.schedules.statements import for_threads, put, when

from .block import ATTRIBUTES, WARP, libm, reduce_warp, sync

THREADS = 1024
#: What stands for a row with a logit that is not finite.
NOT_FINITE = -1

_WARPS = THREADS // WARP
_ALL_LANES = 0xFFFFFFFF
_INFINITE = 0x7F800000
#: Digits of a weight's bits, which are below 2^30, and bins of one.
_DIGITS, _DIGIT_BITS = 3, 10
_BINS = 1 << _DIGIT_BITS
#: Parts in which a mass is added to a bin: 32 bits hold their sum over 2^18 ids.
_PARTS, _PART_BITS = 3, 14
_EVERY_TIE = 0x7FFFFFFF
#: Logits that a thread has on their way: a block alone waits for memory, not for its throughput.
_AHEAD = 8
#: Places in ``numbers`` and in ``places``, which all threads share.
_TARGET, _ABOVE, _POINT = range(3)
_CHOSEN, _TIES = range(2)


def draw(vocab: int, drawable: int) -> tirx.PrimFunc:
    """Build the kernel.

    Arguments of the kernel: logits ``float32[n, vocab]``, draws ``int32[n, DRAW_FIELDS]``, out ``int32[n]``.
    That is an id below ``drawable``, or :data:`NOT_FINITE`. Of equal logits the first is the likeliest.
    """

    @T.prim_func(private=True)
    def draw(logits_h: T.handle, draws_h: T.handle, out_h: T.handle):
        T.func_attr(ATTRIBUTES)
        n = T.int64()
        logits = T.match_buffer(logits_h, (n, vocab), "float32")
        draws = T.match_buffer(draws_h, (n, DRAW_FIELDS), "int32")
        out = T.match_buffer(out_h, (n,), "int32")
        T.device_entry()
        row = T.cta_id([T.cast(n, "int32")])
        thread = T.thread_id([THREADS])
        _Row(logits, draws, row, thread, vocab, drawable).emit(out)

    return draw


class _Row:
    """What the threads of a row's block do, and the memory that they share."""

    def __init__(self, logits: Any, draws: Any, row: Any, thread: Any, vocab: int, drawable: int) -> None:
        self.logits, self.row, self.thread = logits, row, thread
        self.vocab, self.drawable = vocab, drawable
        self.fields = [T.bind(draws[row, i]) for i in range(DRAW_FIELDS)]
        self.warp, self.lane = T.bind(T.shift_right(thread, 5)), T.bind(T.bitwise_and(thread, WARP - 1))
        self.bins = T.alloc_shared((_PARTS, _BINS), "uint32")
        self.sums = T.alloc_shared((_WARPS,), "int64")
        self.counts = T.alloc_shared((_WARPS,), "int32")
        self.numbers = T.alloc_shared((3,), "int64")
        self.places = T.alloc_shared((2,), "int32")
        #: What is kept: ids whose weight has larger bits than the first, and so many of those with the same.
        self.limit = T.alloc_local((2,), "int32")

    def emit(self, out: Any) -> None:
        """All of it."""
        largest, place, bad = self._likeliest()
        self.largest, self.temperature = largest, T.bind(T.reinterpret("float32", self.fields[0]))
        done = T.Or(bad != 0, self.temperature == T.float32(0))
        with T.If(done):
            with T.Then():
                when(
                    self.thread == 0,
                    lambda: put(out, T.Select(bad == 0, place, T.int32(NOT_FINITE)), self.row),
                )
            with T.Else():
                self._limit()
                self._walk(out)

    def _likeliest(self) -> tuple[Any, Any, Any]:
        """The largest logit, its first id, and whether a logit is not finite."""
        best = T.alloc_local((1,), "float32")
        at = T.alloc_local((2,), "int32")
        values = T.alloc_shared((_WARPS,), "float32")
        ids = T.alloc_shared((2, _WARPS), "int32")
        put(best, T.float32("-inf"), 0)
        put(at, T.int32(self.vocab), 0)
        put(at, T.int32(0), 1)

        def take(value, index):
            better = T.Or(value > best[0], T.And(value == best[0], index < at[0]))
            with T.If(better), T.Then():
                put(best, value, 0)
                put(at, index, 0)

        def combine():
            mask = WARP // 2
            while mask:
                value = T.bind(T.tvm_warp_shuffle_xor(T.uint32(_ALL_LANES), best[0], mask, WARP, WARP))
                index = T.bind(T.tvm_warp_shuffle_xor(T.uint32(_ALL_LANES), at[0], mask, WARP, WARP))
                bad = T.bind(T.tvm_warp_shuffle_xor(T.uint32(_ALL_LANES), at[1], mask, WARP, WARP))
                put(at, T.bitwise_or(at[1], bad), 1)
                take(value, index)
                mask //= 2

        def look(index, value):
            # by its bits: an exponent of all ones is infinity or NaN
            exponent = T.bitwise_and(T.reinterpret("int32", value), T.int32(_INFINITE))
            put(at, T.bitwise_or(at[1], T.cast(exponent == T.int32(_INFINITE), "int32")), 1)
            take(value, index)

        self._each_id(look)
        combine()

        def share():
            put(values, best[0], self.warp)
            for i in range(2):
                put(ids, at[i], i, self.warp)

        when(self.lane == 0, share)
        sync()
        put(best, values[self.lane], 0)
        for i in range(2):
            put(at, ids[i, self.lane], i)
        combine()
        return T.bind(best[0]), T.bind(at[0]), T.bind(at[1])

    def _each_id(self, body: Callable[[Any, Any], None]) -> None:
        """Emit ``body(id, logit)`` for every id that may be drawn, dealt to the threads."""
        self._each(self.thread, THREADS, -(-self.drawable // THREADS), self.drawable, body)

    def _each(self, start: Any, stride: int, count: int, end: Any, body: Callable[[Any, Any], None]) -> None:
        """Emit ``body(id, logit)`` for a thread's ids: ``count`` from ``start`` on, those below ``end``."""
        held = T.alloc_local((_AHEAD,), "float32")
        with T.serial(-(-count // _AHEAD)) as turn:
            first = T.bind(start + turn * (_AHEAD * stride))
            with T.unroll(_AHEAD) as i:
                index = T.bind(first + i * stride)
                logit = T.if_then_else(index < end, self.logits[self.row, index], T.float32("-inf"))
                put(held, logit, i)
            with T.unroll(_AHEAD) as i:
                index = T.bind(first + i * stride)
                when(index < end, lambda i=i, index=index: body(index, T.bind(held[i])))

    def _bits(self, logit: Any) -> Any:
        """The weight of a logit as the integer that it compares by."""
        weight = libm("expf", (logit - self.largest) / self.temperature)
        return T.bind(T.reinterpret("int32", weight))

    # ---- what is kept --------------------------------------------------------------------------
    def _limit(self) -> None:
        """Find :attr:`limit`."""
        top_k, top_p = self.fields[1], T.bind(T.reinterpret("float32", self.fields[2]))
        put(self.limit, self.fields[3], 0)  # min_p is a weight itself
        put(self.limit, T.int32(_EVERY_TIE), 1)
        when(
            T.And(top_k > 0, top_k < self.drawable),
            lambda: self._select(lambda _: T.int64(1), lambda _: T.cast(top_k, "int64")),
        )

        def enough(total):
            part = T.ceil(T.cast(top_p, "float64") * T.cast(total, "float64"))
            return T.min(T.cast(part, "int64"), total)

        when(top_p < T.float32(1), lambda: self._select(_mass, enough))

    def _select(self, amount: Callable[[Any], Any], target: Callable[[Any], Any]) -> None:
        """Lower :attr:`limit` to the fewest of the likeliest ids whose amounts reach the target."""
        found = T.alloc_local((1,), "int32")
        put(found, T.int32(0), 0)
        for digit in reversed(range(_DIGITS)):
            shift = digit * _DIGIT_BITS
            for part in range(_PARTS):
                put(self.bins, T.uint32(0), part, self.thread)
            sync()

            def add(_, logit, shift=shift):
                bits = self._bits(logit)
                bin_ = T.bitwise_and(T.shift_right(bits, shift), T.int32(_BINS - 1))
                here = T.shift_right(bits, shift + _DIGIT_BITS) == found[0]
                when(here, lambda: self._add_to(bin_, T.bind(amount(bits))))

            self._each_id(add)
            sync()
            total = _sum_warp(self._bin(self.thread))
            when(self.lane == 0, lambda total=total: put(self.sums, total, self.warp))
            sync()
            when(self.thread == 0, lambda digit=digit: self._choose_bin(target, digit == _DIGITS - 1))
            sync()
            put(found, T.bitwise_or(T.shift_left(found[0], _DIGIT_BITS), self.places[_CHOSEN]), 0)
        one = T.bind(amount(found[0]))
        missing = self.numbers[_TARGET] - self.numbers[_ABOVE]
        ties = T.bind(T.cast(T.truncdiv(missing + (one - 1), one), "int32"))
        old = T.bind(self.limit[0])

        def lower():
            put(self.limit, T.Select(found[0] == old, T.min(self.limit[1], ties), ties), 1)
            put(self.limit, found[0], 0)

        when(found[0] >= old, lower)

    def _add_to(self, bin_: Any, amount: Any) -> None:
        for part in range(_PARTS):
            piece = T.shift_right(amount, T.int64(part * _PART_BITS))
            if part < _PARTS - 1:
                piece = T.bitwise_and(piece, T.int64((1 << _PART_BITS) - 1))
            piece = T.bind(T.cast(piece, "uint32"))
            when(
                piece != T.uint32(0),
                lambda part=part, piece=piece: T.evaluate(
                    T.cuda.atomic_add(T.address_of(self.bins[part, bin_]), piece)
                ),
            )

    def _bin(self, index: Any) -> Any:
        """The amount in a bin."""
        pieces = [
            T.shift_left(T.cast(self.bins[part, index], "int64"), T.int64(part * _PART_BITS))
            for part in range(_PARTS)
        ]
        return T.bind(pieces[0] + pieces[1] + pieces[2])

    def _choose_bin(self, target: Callable[[Any], Any], first: bool) -> None:
        """The bin in which the amounts, from the top, reach the target; for one thread."""
        if first:
            total = T.alloc_local((1,), "int64")
            put(total, T.int64(0), 0)
            with T.serial(_WARPS) as i:
                put(total, total[0] + self.sums[i], 0)
            put(self.numbers, target(total[0]), _TARGET)
            put(self.numbers, T.int64(0), _ABOVE)
        group = _last_that_reaches(self.numbers, _WARPS, lambda i: self.sums[i])
        put(
            self.places,
            group * WARP + _last_that_reaches(self.numbers, WARP, lambda i: self._bin(group * WARP + i)),
            _CHOSEN,
        )

    # ---- the draw ------------------------------------------------------------------------------
    def _walk(self, out: Any) -> None:
        """Find the id before which the kept mass is no more than the point, and past which it is."""
        segment = T.alloc_local((2,), "int32")  # first id, and the one behind the last
        put(segment, T.int32(0), 0)
        put(segment, T.int32(self.drawable), 1)
        width, tie = self.drawable, _mass(self.limit[0])
        for first in (True, False):
            width = -(-width // THREADS) * WARP
            self._sum_segments(segment, width)
            sync()
            when(self.thread == 0, lambda first=first, tie=tie: self._choose_segment(tie, first))
            sync()
            put(segment, segment[0] + self.places[_CHOSEN] * width, 0)
            put(segment, T.min(segment[0] + width, segment[1]), 1)
        keys = T.alloc_shared((width,), "int32")
        for_threads(
            width,
            self.thread,
            THREADS,
            lambda i: when(
                segment[0] + i < segment[1],
                lambda: put(keys, self._bits(self.logits[self.row, segment[0] + i]), i),
            ),
        )
        sync()

        def step(i):
            bits = T.bind(keys[i])
            is_tie = T.bind(T.And(bits == self.limit[0], self.places[_TIES] > 0))

            def keep():
                mass, point = T.bind(_mass(bits)), T.bind(self.numbers[_POINT])
                when(T.And(point >= 0, point < mass), lambda: put(out, segment[0] + i, self.row))
                put(self.numbers, point - mass, _POINT)  # below 0 once it was found

            when(T.Or(bits > self.limit[0], is_tie), keep)
            when(is_tie, lambda: put(self.places, self.places[_TIES] - 1, _TIES))

        def one_by_one():
            with T.serial(segment[1] - segment[0]) as i:
                step(i)

        when(self.thread == 0, one_by_one)

    def _sum_segments(self, segment: Any, width: int) -> None:
        """Each warp's mass above the limit, and number of ids at it, in its ``width`` ids of the segment."""
        mass, ties = T.alloc_local((1,), "int64"), T.alloc_local((1,), "int32")
        put(mass, T.int64(0), 0)
        put(ties, T.int32(0), 0)
        start = T.bind(segment[0] + self.warp * width + self.lane)
        end = T.bind(T.min(segment[0] + (self.warp + 1) * width, segment[1]))

        def look(_, logit):
            bits = self._bits(logit)
            put(mass, mass[0] + T.Select(bits > self.limit[0], _mass(bits), T.int64(0)), 0)
            put(ties, ties[0] + T.cast(bits == self.limit[0], "int32"), 0)

        self._each(start, WARP, width // WARP, end, look)
        total = _sum_warp(mass[0])
        count = reduce_warp(lambda a, b: a + b, ties[0])

        def share():
            put(self.sums, total, self.warp)
            put(self.counts, count, self.warp)

        when(self.lane == 0, share)

    def _choose_segment(self, tie: Any, first: bool) -> None:
        """The warp whose ids hold the point; for one thread. ``tie`` is the mass of an id at the limit."""
        left, chosen = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
        point = T.alloc_local((1,), "int64")

        def kept(i):
            ties = T.bind(T.min(left[0], self.counts[i]))
            return ties, T.bind(self.sums[i] + T.cast(ties, "int64") * tie)

        if first:
            put(left, self.limit[1], 0)
            put(point, T.int64(0), 0)
            with T.serial(_WARPS) as i:
                ties, mass = kept(i)
                put(point, point[0] + mass, 0)
                put(left, left[0] - ties, 0)
            total = T.bind(T.cast(point[0], "float64"))
            before = T.cast(self._uniform() * total, "int64")
            put(point, T.min(before, point[0] - 1), 0)
            put(left, self.limit[1], 0)
        else:
            put(point, self.numbers[_POINT], 0)
            put(left, self.places[_TIES], 0)
        put(chosen, T.int32(-1), 0)
        with T.serial(_WARPS) as i:
            ties, mass = kept(i)

            def skip():
                put(point, point[0] - mass, 0)
                put(left, left[0] - ties, 0)

            with T.If(chosen[0] < 0), T.Then(), T.If(point[0] < mass):
                with T.Then():
                    put(chosen, i, 0)
                with T.Else():
                    skip()
        put(self.places, chosen[0], _CHOSEN)
        put(self.places, left[0], _TIES)
        put(self.numbers, point[0], _POINT)

    def _uniform(self) -> Any:
        """:func:`kvq.runtime.philox.uniform` of the row's seed, choice and position, float64."""
        key, counter = T.alloc_local((2,), "uint32"), T.alloc_local((4,), "uint32")
        for i in range(2):
            put(key, T.reinterpret("uint32", self.fields[4 + i]), i)
            put(counter, T.reinterpret("uint32", self.fields[7 - i]), i)  # position, choice
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


def _mass(bits: Any) -> Any:
    """The mass of a weight, int64."""
    return T.cast(T.reinterpret("float32", bits) * T.float32(2.0**MASS_BITS), "int64")


def _sum_warp(value: Any) -> Any:
    """The sum of an int64 over the warp."""
    mask = WARP // 2
    while mask:
        halves = []
        for part in (value, T.shift_right(value, T.int64(32))):
            word = T.bind(T.cast(part, "uint32"))
            halves.append(T.tvm_warp_shuffle_xor(T.uint32(_ALL_LANES), word, mask, WARP, WARP))
        low, high = (T.cast(half, "int64") for half in halves)
        value = T.bind(value + T.bitwise_or(T.shift_left(high, T.int64(32)), low))
        mask //= 2
    return value


def _last_that_reaches(numbers: Any, count: int, amount: Callable[[Any], Any]) -> Any:
    """The index, from ``count`` down, whose amount brings what is above it to the target.

    What is above the index is then in ``numbers``.
    """
    chosen = T.alloc_local((1,), "int32")
    put(chosen, T.int32(-1), 0)
    with T.serial(count) as i:
        index = T.bind(count - 1 - i)
        with T.If(chosen[0] < 0), T.Then():
            above = T.bind(numbers[_ABOVE] + amount(index))
            with T.If(above >= numbers[_TARGET]):
                with T.Then():
                    put(chosen, index, 0)
                with T.Else():
                    put(numbers, above, _ABOVE)
    return T.bind(chosen[0])
