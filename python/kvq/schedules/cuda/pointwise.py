"""Normalization and the gated activation: one block a row."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from .block import ATTRIBUTES, WARP, add, for_threads, libm, put, reduce_block

THREADS = 256


def rms_norm(dim: int, eps: float) -> tirx.PrimFunc:
    """Build ``out = x / sqrt(mean(x**2) + eps) * weight``.

    Arguments of the kernel: x ``float32[n, dim]``, weight ``float32[dim]``, out ``float32[n, dim]``.
    """

    def norm_row(row, thread, x, weight, out):
        shared = T.alloc_shared((THREADS // WARP,), "float32")
        acc = T.alloc_local((1,), "float32")
        put(acc, T.float32(0), 0)
        for_threads(dim, thread, THREADS, lambda j: put(acc, acc[0] + x[row, j] * x[row, j], 0))
        total = reduce_block(add, acc[0], thread, THREADS, shared)
        factor = T.bind(T.float32(1) / T.sqrt(total / T.float32(dim) + T.float32(eps)))
        for_threads(dim, thread, THREADS, lambda j: put(out, x[row, j] * factor * weight[j], row, j))

    @T.prim_func(private=True)
    def rms_norm(x_h: T.handle, weight: T.Buffer((dim,), "float32"), out_h: T.handle):
        T.func_attr(ATTRIBUTES)
        n = T.int64()
        x = T.match_buffer(x_h, (n, dim), "float32")
        out = T.match_buffer(out_h, (n, dim), "float32")
        T.device_entry()
        row = T.cta_id([T.cast(n, "int32")])
        thread = T.thread_id([THREADS])
        norm_row(row, thread, x, weight, out)

    return rms_norm


def silu_gate(dim: int) -> tirx.PrimFunc:
    """Build ``out = silu(x[:, :dim]) * x[:, dim:]``.

    Arguments of the kernel: x ``float32[n, 2 * dim]``, out ``float32[n, dim]``.
    """

    def gate_row(row, thread, x, out):
        def gate(j):
            value = T.bind(x[row, j])
            sigmoid = T.float32(1) / (T.float32(1) + libm("expf", T.float32(0) - value))
            put(out, value * sigmoid * x[row, j + dim], row, j)

        for_threads(dim, thread, THREADS, gate)

    @T.prim_func(private=True)
    def silu_gate(x_h: T.handle, out_h: T.handle):
        T.func_attr(ATTRIBUTES)
        n = T.int64()
        x = T.match_buffer(x_h, (n, 2 * dim), "float32")
        out = T.match_buffer(out_h, (n, dim), "float32")
        T.device_entry()
        row = T.cta_id([T.cast(n, "int32")])
        thread = T.thread_id([THREADS])
        gate_row(row, thread, x, out)

    return silu_gate
