"""Activations in int8: codes, scales and offsets of a row, for the products with int4 weights."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from .vector import CpuIsa, constant, for_rows, put, reduce_lanes, rint, run, splat
from .weight_blocks import GROUP, ZERO


def quantized_width(k: int) -> int:
    """int32 words of a quantized row: codes, four a word, then scales (float32), then offsets."""
    return k // 4 + 2 * (k // GROUP)


def emit_quantize_row(read, out, i, k: int, isa: CpuIsa) -> None:
    """Quantize a row per group of 32 into ``out[i]``.

    ``read(start)`` gives ``isa.lanes`` float32 numbers of the row. A group's scale is its largest magnitude
    / 127; its offset is -ZERO times the sum of its codes, which turns the codes' zero point into zero.
    """
    groups, lanes = k // GROUP, isa.lanes
    vectors = GROUP // lanes
    red = T.sblock_alloc_buffer((lanes,), "float32")
    total = T.sblock_alloc_buffer((lanes,), "int32")
    with T.serial(groups) as g:
        part = [T.bind(read(g * GROUP + v * lanes)) for v in range(vectors)]
        most = T.max(part[0], constant(0, lanes) - part[0])
        for p in part[1:]:
            most = T.max(most, T.max(p, constant(0, lanes) - p))
        limit = T.bind(reduce_lanes(T.max, T.bind(most), red, lanes))
        put(out, T.reinterpret("int32", limit * T.float32(1 / 127)), i, g + k // 4)
        factor = T.bind(T.float32(127) / T.max(limit, T.float32(1e-30)))
        added = None
        for v, p in enumerate(part):
            code = T.bind(T.cast(rint(p * splat(factor, lanes), lanes), f"int32x{lanes}"))
            packed = T.reinterpret(f"int32x{lanes // 4}", T.cast(code, f"int8x{lanes}"))
            put(out, packed, i, run(g * (GROUP // 4) + v * (lanes // 4), lanes // 4))
            added = code if added is None else added + code
        all_codes = reduce_lanes(lambda a, b: a + b, T.bind(added), total, lanes)
        put(out, all_codes * T.int32(-ZERO), i, g + (k // 4 + groups))


def quantize_rows(k: int, isa: CpuIsa) -> tirx.PrimFunc:
    """Build the kernel that quantizes activations.

    Arguments of the kernel: x ``float32[n, K]``, out ``int32[n, quantized_width(K)]``.
    """
    width = quantized_width(k)

    def quantize_row(i, x, out):
        emit_quantize_row(lambda start: x[i, run(start, isa.lanes)], out, i, k, isa)

    @T.prim_func(s_tir=True, private=True)
    def quantize_rows(x_h: T.handle, out_h: T.handle):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        n = T.int64()
        x = T.match_buffer(x_h, (n, k), "float32")
        out = T.match_buffer(out_h, (n, width), "int32")
        for_rows(n, quantize_row, x, out)

    return quantize_rows
