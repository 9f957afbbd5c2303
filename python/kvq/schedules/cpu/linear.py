"""Matrix products with the weights of a model, ``y[n, N] = x[n, K] @ w[N, K].T``, activations as they are.

Each block of weights becomes float32 once, for all rows. A row's sum runs over the inputs in order, in one
chain, so a row has the same bits alone or in a tile. Weights lie in blocks of 16 output rows
(``weight_blocks.py``).
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from kvq.schedules.statements import put, run

from .vector import CpuIsa, constant, fma, for_blocks, splat
from .weight_blocks import BLOCK, WeightBlocks, num_blocks

#: Inputs of a block of weights that are float32 at a time.
CHUNK = 512
ATTRIBUTES = {"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True}


class Output:
    """Loads and stores of ``y[row, block * 16 ...]``; the last block may be narrower than 16."""

    def __init__(self, y, n_out: int, lanes: int) -> None:
        self.y, self.n_out, self.lanes = y, n_out, lanes

    def _split(self, block, part: int, whole, tail) -> None:
        start = block * BLOCK + part * self.lanes
        if self.n_out % BLOCK == 0:
            whole(start)
            return
        with T.If(start + self.lanes <= self.n_out):
            with T.Then():
                whole(start)
            with T.Else(), T.serial(self.lanes) as e, T.If(start + e < self.n_out), T.Then():
                tail(start, e)

    def store(self, row, block, part: int, source, at: tuple) -> None:
        """``y = source[at, :]``."""
        lanes = self.lanes
        self._split(
            block,
            part,
            lambda start: put(self.y, source[(*at, run(0, lanes))], row, run(start, lanes)),
            lambda start, e: put(self.y, source[(*at, e)], row, start + e),
        )

    def load(self, row, block, part: int, target, at: tuple) -> None:
        """``target[at, :] = y``."""
        lanes = self.lanes
        self._split(
            block,
            part,
            lambda start: put(target, self.y[row, run(start, lanes)], *at, run(0, lanes)),
            lambda start, e: put(target, self.y[row, start + e], *at, e),
        )


def for_tiles(n, rows: int, tile) -> None:
    """Emit ``tile(first_row, rows)`` over all rows, then one by one over what is left."""
    whole = T.bind(T.truncdiv(n, T.int64(rows)))
    with T.serial(whole) as i:
        tile(i * rows, rows)
    with T.serial(n - whole * rows) as i:
        tile(whole * rows + i, 1)


def linear(n_out: int, k: int, storage: str, isa: CpuIsa) -> tirx.PrimFunc:
    """Build the product of float32 activations with a weight of any storage.

    Arguments of the kernel: x ``float32[n, K]``, the tensors of the weight (``weight_blocks.py``), y
    ``float32[n, N]``.
    """
    weight, lanes = WeightBlocks(n_out, k, storage), isa.lanes
    blocks, codes, scales = num_blocks(n_out), weight.code_shape, weight.scale_shape
    rows = 8 if lanes == 16 else 4
    parts = BLOCK // lanes

    def block_rows(block, x, weights, y, n):
        out = Output(y, n_out, lanes)
        acc = T.sblock_alloc_buffer((rows, parts, lanes), "float32")
        wt = T.sblock_alloc_buffer((min(k, CHUNK) * BLOCK,), "float32")

        def chunk(start, count: int, is_first):
            weight.to_float(weights, block, start, count, wt, isa)

            def tile(first, num):
                with T.If(is_first):
                    with T.Then():
                        for r in range(num):
                            for part in range(parts):
                                put(acc, constant(0, lanes), r, part, run(0, lanes))
                    with T.Else():
                        for r in range(num):
                            for part in range(parts):
                                out.load(first + r, block, part, acc, (r, part))
                with T.serial(count) as i:
                    value = [T.bind(splat(x[first + r, start + i], lanes)) for r in range(num)]
                    for part in range(parts):
                        column = T.bind(wt[run(i * BLOCK + part * lanes, lanes)])
                        for r in range(num):
                            total = fma(value[r], column, acc[r, part, run(0, lanes)], lanes)
                            put(acc, total, r, part, run(0, lanes))
                for r in range(num):
                    for part in range(parts):
                        out.store(first + r, block, part, acc, (r, part))

            for_tiles(n, rows, tile)

        whole = k // CHUNK
        if whole:
            with T.serial(whole) as c:
                chunk(c * CHUNK, CHUNK, c == 0)
        if k % CHUNK:
            chunk(whole * CHUNK, k % CHUNK, T.bool(whole == 0))

    if weight.kind.bits is None:

        @T.prim_func(s_tir=True, private=True)
        def linear_float(x_h: T.handle, w: T.Buffer(weight.float_shape, storage), y_h: T.handle):
            T.func_attr(ATTRIBUTES)
            n = T.int64()
            x = T.match_buffer(x_h, (n, k), "float32")
            y = T.match_buffer(y_h, (n, n_out), "float32")
            for_blocks(blocks, block_rows, x, (w,), y, n)

        return linear_float

    if weight.kind.offset is None:

        @T.prim_func(s_tir=True, private=True)
        def linear_codes(
            x_h: T.handle, w: T.Buffer(codes, "uint32"), s: T.Buffer(scales, "float16"), y_h: T.handle
        ):
            T.func_attr(ATTRIBUTES)
            n = T.int64()
            x = T.match_buffer(x_h, (n, k), "float32")
            y = T.match_buffer(y_h, (n, n_out), "float32")
            for_blocks(blocks, block_rows, x, (w, s), y, n)

        return linear_codes

    @T.prim_func(s_tir=True, private=True)
    def linear_offset(
        x_h: T.handle,
        w: T.Buffer(codes, "uint32"),
        s: T.Buffer(scales, "float16"),
        z: T.Buffer(scales, "float16"),
        y_h: T.handle,
    ):
        T.func_attr(ATTRIBUTES)
        n = T.int64()
        x = T.match_buffer(x_h, (n, k), "float32")
        y = T.match_buffer(y_h, (n, n_out), "float32")
        for_blocks(blocks, block_rows, x, (w, s, z), y, n)

    return linear_offset
