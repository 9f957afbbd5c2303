"""Matrix products with the weights of a model: which kernel makes them depends on the number of rows."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.schedules.statements import put, when

from .block import ATTRIBUTES, launch
from .limits import GpuLimits
from .linear_rows import FEW_ROWS, multiply_rows, rows_tuning
from .linear_tiles import multiply_tiles
from .stored_weight import declare_weight

#: Rows from which on tiles pay: with fewer they stand empty, and are too few to fill a GPU.
_TILES_FROM = 8 * FEW_ROWS + 1


def linear(n_out: int, k: int, storage: str, limits: GpuLimits) -> tirx.PrimFunc:
    """Build ``out = x @ w.T`` for a weight of any storage: one launch, for one row, a few or many.

    Arguments of the kernel: x ``float32[n, K]``, the tensors of the weight as stored, out ``float32[n, N]``.

    Raises
    ------
    CompileError
        If K is no multiple of 8.
    """
    tuning = rows_tuning(n_out, k, limits)
    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        n = IRBuilder.name("n", T.int32())
        x = builder.arg("x", T.Buffer((n, k), "float32"))
        weight = declare_weight(n_out, k, storage)
        out = builder.arg("out", T.Buffer((n, n_out), "float32"))

        def few(count: int) -> None:
            def input_of(row, column):
                return x[row, column] if count == 1 else T.if_then_else(row < n, x[row, column], T.float32(0))

            def store(row, output, value):
                when(row < n, lambda: put(out, value, row, output))

            blocks = T.truncdiv(n + (count - 1), count)
            multiply_rows(weight, tuning, count, k, blocks, lambda _: 0, n_out, input_of, store)

        with T.If(n == 1):
            with T.Then():
                few(1)
            with T.Else(), T.If(n < _TILES_FROM):
                with T.Then():
                    few(FEW_ROWS)
                with T.Else():
                    multiply_tiles(weight, x, out, n, k, n_out)
    return script.get()


def prepare_vector(n: int, dtype: str, limits: GpuLimits) -> tirx.PrimFunc:
    """Build the kernel from a stored vector ``dtype[n]`` to float32."""
    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        raw = builder.arg("raw", T.Buffer((n,), dtype))
        out = builder.arg("out", T.Buffer((n,), "float32"))
        with launch([-(-n // limits.threads)], limits.threads) as (block, thread):
            i = T.bind(block * limits.threads + thread)
            when(i < n, lambda: put(out, T.cast(raw[i], "float32"), i))
    return script.get()
