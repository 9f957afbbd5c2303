"""A row of logits as the threads of its block go through it, and the memory that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from kvq.runtime.sampler import DRAW_FIELDS, MASS_BITS
from kvq.schedules.statements import put, when

from .block import WARP, libm

THREADS = 1024
WARPS = THREADS // WARP
ALL_LANES = 0xFFFFFFFF
#: Bins of a histogram, and parts in which an amount is added to one: 32 bits hold their sum over 2^18 ids.
BINS, PARTS, PART_BITS = 1 << 10, 3, 14
#: Logits that a thread has on their way: a block alone waits for memory, not for its throughput.
_AHEAD = 8
#: Places in ``numbers`` and in ``places``, which all threads share.
TARGET, ABOVE, POINT = range(3)
CHOSEN, TIES = range(2)


class Row:
    """The row of a block, for each of its threads.

    Attributes
    ----------
    fields : list
        The row's draw (:data:`kvq.runtime.sampler.DRAW_FIELDS`).
    limit : buffer
        What is kept: ids whose weight has larger bits than the first, and so many of those with the same.
    largest, temperature
        The largest logit and the divisor, float32, once :meth:`weigh` has been told them.
    """

    def __init__(self, logits: Any, draws: Any, row: Any, thread: Any, vocab: int, drawable: int) -> None:
        self.logits, self.row, self.thread = logits, row, thread
        self.vocab, self.drawable = vocab, drawable
        self.fields = [T.bind(draws[row, i]) for i in range(DRAW_FIELDS)]
        self.warp, self.lane = T.bind(T.shift_right(thread, 5)), T.bind(T.bitwise_and(thread, WARP - 1))
        self.bins = T.alloc_shared((PARTS, BINS), "uint32")
        self.sums = T.alloc_shared((WARPS,), "int64")
        self.counts = T.alloc_shared((WARPS,), "int32")
        self.numbers = T.alloc_shared((3,), "int64")
        self.places = T.alloc_shared((2,), "int32")
        self.limit = T.alloc_local((2,), "int32")

    def weigh(self, largest: Any, temperature: Any) -> None:
        """Take what makes a weight of a logit."""
        self.largest, self.temperature = largest, temperature

    def each_id(self, body: Callable[[Any, Any], None]) -> None:
        """Emit ``body(id, logit)`` for every id that may be drawn, dealt to the threads."""
        self.each(self.thread, THREADS, -(-self.drawable // THREADS), self.drawable, body)

    def each(self, start: Any, stride: int, count: int, end: Any, body: Callable[[Any, Any], None]) -> None:
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

    def bits(self, logit: Any) -> Any:
        """The weight of a logit as the integer that it compares by."""
        weight = libm("expf", (logit - self.largest) / self.temperature)
        return T.bind(T.reinterpret("int32", weight))


def mass_of(bits: Any) -> Any:
    """The mass of a weight, int64."""
    return T.cast(T.reinterpret("float32", bits) * T.float32(2.0**MASS_BITS), "int64")


def sum_warp(value: Any) -> Any:
    """The sum of an int64 over the warp."""
    mask = WARP // 2
    while mask:
        halves = []
        for part in (value, T.shift_right(value, T.int64(32))):
            word = T.bind(T.cast(part, "uint32"))
            halves.append(T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), word, mask, WARP, WARP))
        low, high = (T.cast(half, "int64") for half in halves)
        value = T.bind(value + T.bitwise_or(T.shift_left(high, T.int64(32)), low))
        mask //= 2
    return value
