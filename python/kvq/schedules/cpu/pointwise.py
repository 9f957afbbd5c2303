"""Normalization and gated activations: one pass over each row, vectorized."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from kvq.schedules.gelu import GELU_CUBIC, GELU_SCALE
from kvq.schedules.statements import put, run

from .activations import emit_quantize_row, quantized_width
from .row_ops import vector_lanes
from .vector import CpuIsa, constant, exp, fma, for_rows, reduce_lanes, splat


def rms_norm(dim: int, eps: float, isa: CpuIsa, quantize: bool = False) -> tirx.PrimFunc:
    """Build ``out = x / sqrt(mean(x**2) + eps) * weight``, quantized for ``linear_q8`` if asked.

    Arguments of the kernel: x ``float32[n, dim]``, weight ``float32[dim]``, out ``float32[n, dim]`` or
    ``int32[n, quantized_width(dim)]``.
    """
    lanes = vector_lanes(dim, isa.lanes)
    width, dtype = (quantized_width(dim), "int32") if quantize else (dim, "float32")

    def norm_row(i, x, weight, out):
        acc = T.sblock_alloc_buffer((lanes,), "float32")
        red = T.sblock_alloc_buffer((lanes,), "float32")
        put(acc, constant(0, lanes), run(0, lanes))
        with T.serial(dim // lanes) as j:
            value = T.bind(x[i, run(j * lanes, lanes)])
            put(acc, fma(value, value, acc[run(0, lanes)], lanes), run(0, lanes))
        total = reduce_lanes(lambda a, b: a + b, acc[run(0, lanes)], red, lanes)
        factor = T.bind(T.float32(1) / T.sqrt(total / T.float32(dim) + T.float32(eps)))

        def normalized(start):
            at = run(start, lanes)
            return x[i, at] * splat(factor, lanes) * weight[at]

        if quantize:
            emit_quantize_row(normalized, out, i, dim, isa)
        else:
            with T.serial(dim // lanes) as j:
                put(out, normalized(j * lanes), i, run(j * lanes, lanes))

    @T.prim_func(s_tir=True, private=True)
    def rms_norm(x_h: T.handle, weight: T.Buffer((dim,), "float32"), out_h: T.handle):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        n = T.int64()
        x = T.match_buffer(x_h, (n, dim), "float32")
        out = T.match_buffer(out_h, (n, width), dtype)
        for_rows(n, norm_row, x, weight, out)

    return rms_norm


def gate(dim: int, activation: str, isa: CpuIsa, quantize: bool = False) -> tirx.PrimFunc:
    """Build ``out = act(x[:, :dim]) * x[:, dim:]``, quantized for ``linear_q8`` if asked.

    ``activation`` is ``silu`` or ``gelu_tanh``; both are ``g * sigmoid(s)``, with ``s = g`` or twice the
    argument of gelu's tanh.

    Arguments of the kernel: x ``float32[n, 2 * dim]``, out ``float32[n, dim]`` or
    ``int32[n, quantized_width(dim)]``.
    """
    lanes = vector_lanes(dim, isa.lanes)
    width, dtype = (quantized_width(dim), "int32") if quantize else (dim, "float32")

    def gate_row(i, x, out):
        def gated(start):
            value = T.bind(x[i, run(start, lanes)])
            s = value
            if activation == "gelu_tanh":
                cubic = fma(value * value, constant(GELU_CUBIC, lanes), constant(1, lanes), lanes)
                s = T.bind(value * constant(GELU_SCALE, lanes) * cubic)
            # e**-|s| never overflows: sigmoid(s) = 1 / (1 + e**-|s|), times e**-|s| where s < 0
            small = T.bind(exp(T.min(s, constant(0, lanes) - s), lanes))
            above = T.Select(s < constant(0, lanes), small, constant(1, lanes))
            sigmoid = above / (constant(1, lanes) + small)
            return value * sigmoid * x[i, run(start + dim, lanes)]

        if quantize:
            emit_quantize_row(gated, out, i, dim, isa)
        else:
            with T.serial(dim // lanes) as j:
                put(out, gated(j * lanes), i, run(j * lanes, lanes))

    @T.prim_func(s_tir=True, private=True)
    def gate(x_h: T.handle, out_h: T.handle):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        n = T.int64()
        x = T.match_buffer(x_h, (n, 2 * dim), "float32")
        out = T.match_buffer(out_h, (n, width), dtype)
        for_rows(n, gate_row, x, out)

    return gate
