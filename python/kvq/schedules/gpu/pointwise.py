"""Normalization and the gated activation of float32 rows."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.schedules.gelu import GELU_CUBIC, GELU_SCALE
from kvq.schedules.statements import for_threads, put, when

from .block import ATTRIBUTES, add, launch, launch_many, local, reduce_lanes, shared
from .limits import GpuLimits

_THREADS = 256
#: ``exp`` of it is a large float32, its inverse as good as 0.
_MOST_EXPONENT = 88.0


def rms_norm(dim: int, eps: float, limits: GpuLimits) -> tirx.PrimFunc:
    """Build ``out = x / sqrt(mean(x**2) + eps) * weight``: a workgroup a row.

    Arguments of the kernel: x ``float32[n, dim]``, weight ``float32[dim]``, out ``float32[n, dim]``.
    """
    threads = _threads(limits)
    while threads > dim:
        threads //= 2
    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        n = IRBuilder.name("n", T.int32())
        x = builder.arg("x", T.Buffer((n, dim), "float32"))
        weight = builder.arg("weight", T.Buffer((dim,), "float32"))
        out = builder.arg("out", T.Buffer((n, dim), "float32"))
        with launch_many(n, threads) as (row, thread):
            squares = local((1,), "float32")
            sums = shared((1, threads), "float32")
            put(squares, T.float32(0), 0)

            def square(i):
                value = T.bind(x[row, i])
                put(squares, squares[0] + value * value, 0)

            for_threads(dim, thread, threads, square)
            put(sums, squares[0], 0, thread)
            reduce_lanes(add, sums, 1, thread, threads, limits.subgroup)
            factor = T.bind(T.float32(1) / T.sqrt(sums[0, 0] / T.float32(dim) + T.float32(eps)))
            for_threads(dim, thread, threads, lambda i: put(out, x[row, i] * factor * weight[i], row, i))
    return script.get()


def gate(dim: int, activation: str, limits: GpuLimits) -> tirx.PrimFunc:
    """Build ``out = act(x[:, :dim]) * x[:, dim:]``; ``activation`` is ``silu`` or ``gelu_tanh``.

    Arguments of the kernel: x ``float32[n, 2 * dim]``, out ``float32[n, dim]``.
    """
    threads = _threads(limits)
    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        n = IRBuilder.name("n", T.int32())
        x = builder.arg("x", T.Buffer((n, 2 * dim), "float32"))
        out = builder.arg("out", T.Buffer((n, dim), "float32"))
        with launch([-(-dim // threads), n], threads) as (piece, row, thread):
            i = T.bind(piece * threads + thread)

            def gate_one():
                value = T.bind(x[row, i])
                s = value
                if activation == "gelu_tanh":
                    s = value * T.float32(GELU_SCALE) * (T.float32(1) + T.float32(GELU_CUBIC) * value * value)
                # an exponential that overflows is undefined where a compiler assumes finite numbers
                exponent = T.min(T.float32(0) - s, T.float32(_MOST_EXPONENT))
                sigmoid = T.float32(1) / (T.float32(1) + T.exp(exponent))
                put(out, value * sigmoid * x[row, dim + i], row, i)

            when(i < dim, gate_one)
    return script.get()


def _threads(limits: GpuLimits) -> int:
    return min(_THREADS, limits.threads)
