"""Products of a weight with a few rows: what decoding needs, bound by reading the weight once.

A block makes a tile of 16 outputs for all rows; its warps share the inputs, unit by unit in turn, and add up
in a fixed order. A warp keeps some units ahead in registers, so that memory always has something to do. Rows
are read from the second-level cache by whoever needs them: they are small beside the weight.

Where GPUs allow it, the kernel starts while the one before it runs: weights do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from kvq.schedules.statements import for_threads, put

from .block import WARP, kernel_attributes, let_next_start, overlaps, wait_for_rows
from .mma import block_sync, load_global, mma, u32
from .products import product_func
from .unit_weights import UnitWeights
from .weight_fragments import STEPS, TILE, UNIT, tiles, unit_words

#: How weights are read: once. Not as ``.nc``, which ptxas moves behind the wait for the kernel before.
_ONCE = ".L1::no_allocate"
#: Most rows: two tiles of 8.
MOST_ROWS = 16
#: Tiles of a weight that keep all multiprocessors busy with small blocks.
MANY_TILES = 1024
#: Inputs that are enough for blocks of twice as many warps.
LONG = 8192


@dataclass(frozen=True)
class FewTuning:
    """How the kernel is cut; it changes the speed, and the order of sums.

    Attributes
    ----------
    warps : int
        Warps that share a tile's inputs.
    ahead : int
        Units that a warp has under way.
    overlap : bool
        Start while the kernel before is running (sm_90 and newer).
    """

    warps: int = 8
    ahead: int = 4
    overlap: bool = False


def few_tuning(n_out: int, k: int, storage: str, archs: Sequence[str]) -> FewTuning:
    """The tuning for GPUs of every one of ``archs`` (``sm_90`` and the like), measured on an H200."""
    overlap = overlaps(archs)
    if storage == "float16":
        return FewTuning(warps=8, ahead=2, overlap=overlap)
    # blocks enough for every multiprocessor: then fewer warps have more to do between two meetings
    warps = 4 if tiles(n_out) >= MANY_TILES else 16 if k >= LONG else 8
    return FewTuning(warps=warps, ahead=4, overlap=overlap)


class _Few:
    """The statements of the kernel."""

    def __init__(self, k: int, storage: str, tuning: FewTuning, dtype: str) -> None:
        self.k, self.units, self.storage, self.tuning, self.dtype = k, k // UNIT, storage, tuning, dtype
        self.words = unit_words(storage)
        self.stride = self.words + (1 if storage == "int4" else 0)

    def load_unit(self, weight, tile, unit, lane, held, slot: int) -> None:
        """The lane's words of a unit to ``held``, in the place of ``slot``."""
        at = slot * self.stride
        if self.storage == "int4":
            codes, scales = weight
            source = T.bind(codes.ptr_to([tile, unit, lane, 0]))
            load_global(held, at, 4, source, cache=_ONCE)
            g, group = T.shift_right(lane, 2), T.shift_right(T.bitwise_and(lane, 3), 1)
            source = T.bind(scales.ptr_to([tile, unit, group, g, 0]))
            load_global(held, at + self.words, 1, source, cache=_ONCE)
            return
        source = T.bind(weight[0].ptr_to([tile, unit, 0, lane, 0]))
        for step in range(STEPS):
            load_global(held, at + 4 * step, 4, source, 512 * step, cache=_ONCE)

    def products(self, weight, x, tile, n, row_tiles: int, warp, lane):
        """The warp's part of the sums: ``4 * row_tiles`` registers."""
        ahead, warps = self.tuning.ahead, self.tuning.warps
        g, c = T.bind(T.shift_right(lane, 2)), T.bind(T.bitwise_and(lane, 3))
        count = T.bind(T.truncdiv(self.units - warp + (warps - 1), warps))
        held = T.alloc_local([ahead * self.stride], "uint32")
        acc = T.alloc_local([4 * row_tiles], "float32")
        values = T.alloc_local([8 * row_tiles], "uint32")
        a = T.alloc_local([4], "uint32")
        for i in range(4 * row_tiles):
            put(acc, T.float32(0), i)
        for i in range(8 * row_tiles):
            put(values, u32(0), i)
        for slot in range(ahead):
            with T.If(slot < count), T.Then():
                self.load_unit(weight, tile, warp + slot * warps, lane, held, slot)
        wait_for_rows(self.tuning.overlap)
        with T.serial(T.truncdiv(count + (ahead - 1), ahead)) as turn:
            for slot in range(ahead):
                index = T.bind(turn * ahead + slot)
                with T.If(index < count), T.Then():
                    unit = T.bind(warp + index * warps)
                    for tile8 in range(row_tiles):
                        row = T.bind(g + 8 * tile8)
                        with T.If(row < n), T.Then():
                            source = T.bind(x.ptr_to([row, unit * UNIT + c * 16]))
                            for half in range(2):
                                load_global(values, 8 * tile8 + 4 * half, 4, source, 16 * half)
                    at = slot * self.stride
                    weights = UnitWeights(self.storage, held, at, at + self.words, self.dtype)
                    for step in range(STEPS):
                        registers = weights.registers(step, a)
                        for tile8 in range(row_tiles):
                            b = [values[8 * tile8 + 2 * step + i] for i in range(2)]
                            mma(acc, 4 * tile8, registers, b, dtype=self.dtype)
                    following = T.bind(index + ahead)
                    with T.If(following < count), T.Then():
                        self.load_unit(weight, tile, warp + following * warps, lane, held, slot)
        return acc

    def finish(
        self, acc, row_tiles: int, added, out, tile, n, n_out: int, warp, lane, thread, shared
    ) -> None:
        """Add up the warps' parts, in order, and store."""
        warps = self.tuning.warps
        for i in range(4 * row_tiles):
            put(shared, acc[i], warp, i, lane)
        block_sync()

        def store(i):
            row, output = T.bind(T.shift_right(i, 4)), T.bind(T.bitwise_and(i, TILE - 1))
            register = T.bind(
                T.shift_right(row, 3) * 4 + T.shift_right(output, 3) * 2 + T.bitwise_and(row, 1)
            )
            at = T.bind(T.bitwise_and(output, 7) * 4 + T.shift_right(T.bitwise_and(row, 7), 1))
            total = shared[0, register, at]
            for other in range(1, warps):
                total = total + shared[other, register, at]
            target = T.bind(tile * TILE + output)
            with T.If(T.And(row < n, target < n_out)), T.Then():
                put(out, total if added is None else added[row, target] + total, row, target)

        for_threads(8 * row_tiles * TILE, thread, warps * WARP, store)

    def block(self, weight, x, added, out, n, n_out: int, tile, thread, shared) -> None:
        """A block's tile."""
        warp, lane = T.bind(T.shift_right(thread, 5)), T.bind(T.bitwise_and(thread, WARP - 1))
        let_next_start(self.tuning.overlap)
        with T.If(n <= 8):
            for row_tiles, branch in ((1, T.Then), (MOST_ROWS // 8, T.Else)):
                with branch():
                    acc = self.products(weight, x, tile, n, row_tiles, warp, lane)
                    self.finish(acc, row_tiles, added, out, tile, n, n_out, warp, lane, thread, shared)


def linear_few(
    n_out: int, k: int, storage: str, tuning: FewTuning, residual: bool = False, dtype: str = "float16"
) -> tirx.PrimFunc:
    """Build the product for at most :data:`MOST_ROWS` rows; its arguments are those of ``products.py``."""
    kernel = _Few(k, storage, tuning, dtype)

    def body(weight, x, _gain, added, out, n):
        tile = T.cta_id([tiles(n_out)])
        thread = T.thread_id([tuning.warps * WARP])
        shared = T.alloc_shared((tuning.warps, 4 * MOST_ROWS // 8, WARP), "float32", align=128)
        kernel.block(weight, x, added, out, T.bind(T.cast(n, "int32")), n_out, tile, thread, shared)

    return product_func(n_out, k, storage, residual, kernel_attributes(tuning.overlap), body, dtype=dtype)
