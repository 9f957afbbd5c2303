"""Rows of a matrix-vector product in shared memory, as operand B of its tensor-core products.

::

    rows     operand[MOST_ROWS, K + 8]   rounded; eight numbers beside each, so that rows lie on other banks
    offsets  float32[K / 64, 8]          of int4: where the sums of a unit start, column 4 * group + row
    parts    float32[MOST_ROWS, warps]   of the mean of squares
    gain     float32[K]                  of a norm

A block makes these from rows that are rounded already, that it rounds, or that it normalizes and rounds.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.schedules.backend import RowSource
from kvq.schedules.statements import put, when

from .block import WARP, add, libm, reduce_warp
from .mma import (
    block_sync,
    copies_commit,
    copies_wait,
    copy_async,
    load_global,
    load_shared,
    store_shared,
    u32,
)
from .pointwise import rounded
from .weight_fragments import UNIT

#: Most rows: two groups of inputs by four rows are the eight columns of operand B.
MOST_ROWS = 4
#: Numbers between two rows.
_PAD = 8


class SharedRows:
    """The layout, and the statements that fill it.

    Parameters
    ----------
    k : int
        Inputs.
    source : RowSource
        What the rows are.
    threads : int
        Threads of a block.
    dtype : str
        Of the operands.
    center : float or None
        What the sum of a group of inputs is multiplied by for the offsets; None: there are none.

    Attributes
    ----------
    row_bytes : int
        From a row to the next.
    offsets_at, end : int
        Bytes from the start of the rows to the offsets, and to the end of all.
    """

    def __init__(self, k: int, source: RowSource, threads: int, dtype: str, center: float | None) -> None:
        self.k, self.source, self.threads, self.dtype, self.center = k, source, threads, dtype, center
        self.width = 8 if source.rounded else 4
        self.vectors = k // self.width
        self.held = -(-self.vectors // threads)
        self.warps = threads // WARP
        self.row_bytes = 2 * (k + _PAD)
        self.offsets_at = MOST_ROWS * self.row_bytes
        self.parts_at = self.offsets_at + (0 if center is None else 4 * 8 * (k // UNIT))
        self.gain_at = self.parts_at + (0 if source.eps is None else 4 * MOST_ROWS * self.warps)
        self.end = self.gain_at + (0 if source.eps is None else 4 * k)

    def begin(self, gain, thread, base) -> None:
        """Start copying what does not depend on the kernel before, to where ``base`` in shared memory is."""
        self.thread, self.base = thread, base
        if self.source.eps is None:
            return

        def copy(_step, at) -> None:
            source, target = T.bind(gain.ptr_to([at * 4])), T.bind(base + T.cast(at * 16, "uint32"))
            copy_async(target, self.gain_at, source, 0)

        self._each(copy)
        copies_commit()

    def fill(self, x, n) -> None:
        """Make the rows; all threads see them then."""
        self.x = x
        lines = [T.alloc_local([4 * self.held], "uint32") for _ in range(2)]

        def from_row(row: int) -> None:
            """The next row is on its way while one is made."""
            if row + 1 == MOST_ROWS:
                self._make(row, lines[row % 2])
                return
            when(row + 1 < n, lambda: self._load(row + 1, lines[(row + 1) % 2]))
            self._make(row, lines[row % 2])
            when(row + 1 < n, lambda: from_row(row + 1))

        def all_rows() -> None:
            self._load(0, lines[0])
            if self.source.eps is not None:
                copies_wait(0)  # a thread reads what it copied itself
            from_row(0)

        when(n > 0, all_rows)
        block_sync()

    def _each(self, body) -> None:
        """``body(step, vector)`` for the vectors of the thread."""
        for step in range(self.held):
            at = T.bind(self.thread + step * self.threads)
            if (step + 1) * self.threads <= self.vectors:
                body(step, at)
            else:
                when(at < self.vectors, lambda step=step, at=at: body(step, at))

    def _load(self, row: int, line) -> None:
        # not through the first-level cache: the kernel before may write them while this one is there
        self._each(
            lambda step, at: load_global(
                line, 4 * step, 4, T.bind(self.x.ptr_to([row, at * self.width])), cache=".cg"
            )
        )

    def _make(self, row: int, line) -> None:
        """A row in shared memory from the thread's vectors of it."""
        values = line.view(self.dtype if self.source.rounded else "float32")
        factor = None if self.source.eps is None else self._factor(row, values)
        total = T.alloc_local([1], "float32")
        made = T.alloc_local([4], self.dtype)
        gain = T.alloc_local([4], "float32")

        def make(step, at) -> None:
            target = T.bind(self.base + T.cast(row * self.row_bytes + at * (2 * self.width), "uint32"))
            if self.source.rounded:
                store_shared(target, 0, [line[4 * step + i] for i in range(4)], kind="u32")
                numbers = [values[8 * step + i] for i in range(8)]
            else:
                if factor is not None:
                    gains = T.bind(self.base + T.cast(at * 16, "uint32"))
                    load_shared(gain, 0, 4, gains, self.gain_at, kind="f32")
                for i in range(4):
                    value = values[4 * step + i]
                    value = value if factor is None else value * factor * gain[i]
                    put(made, rounded(value, self.dtype), i)
                words = made.view("uint32")
                store_shared(target, 0, [words[0], words[1]], kind="u32")
                numbers = [made[i] for i in range(4)]
            if self.center is not None:
                put(total, sum((T.cast(number, "float32") for number in numbers), T.float32(0)), 0)

        def add_up(at) -> None:
            """The sum of a group, which neighbouring lanes have: it lies in one warp, whole."""
            lanes = UNIT // 2 // self.width
            group = reduce_warp(add, total[0], lanes)

            def store() -> None:
                number = T.bind(T.truncdiv(at, lanes))
                place = T.shift_right(number, 1) * 32 + (T.bitwise_and(number, 1) * 4 + row) * 4
                target = T.bind(self.base + T.cast(place, "uint32"))
                store_shared(target, self.offsets_at, [group * T.float32(self.center)])

            when(T.And(T.bitwise_and(self.thread, lanes - 1) == 0, at < self.vectors), store)

        for step in range(self.held):
            at = T.bind(self.thread + step * self.threads)
            if (step + 1) * self.threads <= self.vectors:
                make(step, at)
            else:
                when(at < self.vectors, lambda step=step, at=at: make(step, at))
            if self.center is not None:
                add_up(at)

    def _factor(self, row: int, values):
        """What normalizes a row."""
        acc = T.alloc_local([1], "float32")
        put(acc, T.float32(0), 0)

        def square(step, _at) -> None:
            for i in range(4):
                value = values[4 * step + i]
                put(acc, acc[0] + value * value, 0)

        self._each(square)
        total = reduce_warp(add, acc[0])
        place = T.bind(self.base + u32(self.parts_at + 4 * row * self.warps))
        own = T.bind(place + T.cast(T.shift_right(self.thread, 5) * 4, "uint32"))
        when(T.bitwise_and(self.thread, WARP - 1) == 0, lambda: store_shared(own, 0, [total]))
        block_sync()
        parts = T.alloc_local([self.warps], "float32")
        for first in range(0, self.warps, 4):
            load_shared(parts, first, 4, place, 4 * first, kind="f32")
        mean = sum((parts[i] for i in range(1, self.warps)), parts[0]) * T.float32(1 / self.k)
        return T.bind(libm("rsqrtf", mean + T.float32(self.source.eps)))
