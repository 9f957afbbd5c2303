"""Activations in int8: codes, scales and sums of a row, for the products with weights that are codes."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from kvq.schedules.statements import put, run

from .vector import CpuIsa, constant, for_rows, reduce_lanes, rint, splat
from .weight_blocks import GROUP


def quantized_width(k: int) -> int:
    """int32 words of a quantized row: codes, four a word; scales (float32); sums of codes, two a group."""
    return k // 4 + 3 * (k // GROUP)


def scale_at(k: int, g):
    """Word of a quantized row that holds the scale of group ``g``."""
    return g + k // 4


def sums_at(k: int, g):
    """First of the two words with the sums of the codes of group ``g``: its first 16, its last 16."""
    return g * 2 + (k // 4 + k // GROUP)


def emit_quantize_row(read, out, i, k: int, isa: CpuIsa) -> None:
    """Quantize a row per group of 32 into ``out[i]``.

    ``read(start)`` gives ``isa.lanes`` float32 numbers of the row. A group's scale is its largest magnitude
    / 127. With the sums a product turns the center of the weights' codes into zero, or adds their minimum.
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
        put(out, T.reinterpret("int32", limit * T.float32(1 / 127)), i, scale_at(k, g))
        factor = T.bind(T.float32(127) / T.max(limit, T.float32(1e-30)))
        codes = [T.bind(T.cast(rint(p * splat(factor, lanes), lanes), f"int32x{lanes}")) for p in part]
        for v, code in enumerate(codes):
            packed = T.reinterpret(f"int32x{lanes // 4}", T.cast(code, f"int8x{lanes}"))
            put(out, packed, i, run(g * (GROUP // 4) + v * (lanes // 4), lanes // 4))
        for half in range(2):
            added, *rest = codes[half * vectors // 2 : (half + 1) * vectors // 2]
            for code in rest:
                added = added + code
            in_half = reduce_lanes(lambda a, b: a + b, T.bind(added), total, lanes)
            put(out, in_half, i, sums_at(k, g) + half)


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
