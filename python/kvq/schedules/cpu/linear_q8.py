"""Matrix products of int8 activations (``activations.py``) with weights that are codes.

The sum of codes times codes inside a group is exact in integers, whatever instruction computes it; scales and
minimums come in once a group. A row's sum runs over the groups in order, so a row has the same bits alone or
in a tile. Weights lie in blocks of 16 output rows (``weight_blocks.py``).
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from kvq.schedules.statements import put, run

from .activations import quantized_width, scale_at, sums_at
from .linear import ATTRIBUTES, Output, for_tiles
from .vector import CpuIsa, constant, fma, for_blocks, intrinsic, splat
from .weight_blocks import BLOCK, GROUP, HALF, WeightBlocks, num_blocks


def _dot(codes, x, bits: int, offset, isa: CpuIsa):
    """Sum of codes times int8 activations, plus ``offset``, in int32 lanes.

    Every byte of the uint32 vectors ``codes`` is one code; ``x[j]`` is the scalar int32 with the four
    activations that meet ``codes[j]``.
    """
    lanes = isa.lanes
    total = splat(offset, lanes)
    if isa.dot == "vnni512":
        for code, value in zip(codes, x, strict=True):
            total = intrinsic(
                "llvm.x86.avx512.vpdpbusd.512",
                "int32x16",
                total,
                T.reinterpret("int8x64", code),
                T.reinterpret("int8x64", splat(value, lanes)),
            )
        return total
    if isa.dot == "maddubs":
        return total + (_dot4_avx2(codes, x) if bits == 4 else _dot8_avx2(codes, x))
    for code, value in zip(codes, x, strict=True):
        for byte in range(4):
            c = T.bitwise_and(
                T.shift_right(code, splat(T.uint32(8 * byte), lanes)), splat(T.uint32(255), lanes)
            )
            signed = T.shift_right(T.shift_left(value, T.int32(24 - 8 * byte)), T.int32(24))
            total = total + T.reinterpret(f"int32x{lanes}", c) * splat(signed, lanes)
    return total


def _dot4_avx2(codes, x):
    """Codes below 16: eight products of at most 2 * 15 * 127 each fit int16."""
    total = None
    for code, value in zip(codes, x, strict=True):
        products = intrinsic(
            "llvm.x86.avx2.pmadd.ub.sw",
            "int16x16",
            T.reinterpret("int8x32", code),
            T.reinterpret("int8x32", splat(value, 8)),
        )
        total = products if total is None else total + products
    return _madd(total, splat(T.int16(1), 16))


def _dot8_avx2(codes, x):
    """Codes up to 255: even and odd bytes apart, as int16, whose pairs of products are int32."""
    total = None
    for code, value in zip(codes, x, strict=True):
        eight, low = splat(T.uint32(8), 8), splat(T.uint32(0x00FF00FF), 8)
        octets = T.reinterpret("int16x16", splat(value, 8))
        shift = splat(T.int16(8), 16)
        for half, signed in (
            (T.bitwise_and(code, low), T.shift_right(T.shift_left(octets, shift), shift)),
            (T.bitwise_and(T.shift_right(code, eight), low), T.shift_right(octets, shift)),
        ):
            products = _madd(T.reinterpret("int16x16", half), signed)
            total = products if total is None else total + products
    return total


def _madd(a, b):
    """Products of int16 lanes, neighbours added, in int32."""
    return intrinsic("llvm.x86.avx2.pmadd.wd", "int32x8", a, b)


def linear_q8(n_out: int, k: int, storage: str, isa: CpuIsa, residual: bool = False) -> tirx.PrimFunc:
    """Build the product of int8 activations with a weight that is codes, plus a residual if asked.

    Arguments of the kernel: quantized rows ``int32[n, quantized_width(K)]``, the tensors of the weight
    (``weight_blocks.py``), the residual ``float32[n, N]`` if there is one, y ``float32[n, N]``.
    """
    weight, lanes, width = WeightBlocks(n_out, k, storage), isa.lanes, quantized_width(k)
    kind, blocks, groups = weight.kind, num_blocks(n_out), k // GROUP
    codes, scales = weight.code_shape, weight.scale_shape
    rows = 8 if lanes == 16 else 4

    def block_rows(block, x, weights, res, y, n):
        out = Output(y, n_out, lanes)
        acc = T.sblock_alloc_buffer((rows, lanes), "float32")
        add = T.sblock_alloc_buffer((1, lanes), "float32")

        def add_group(row, g, words, factors, total):
            """``total`` plus the products of group ``g``: all 32 at once, or each half with its own scale."""
            scale_x = T.reinterpret("float32", x[row, scale_at(k, g)])
            sums = [x[row, sums_at(k, g) + half] for half in range(2)]
            values = [x[row, g * (2 * HALF) + j] for j in range(2 * HALF)]
            if kind.group == GROUP:
                parts = [(words, values, sums[0] + sums[1])]
            else:
                parts = [
                    (words[half * HALF :][:HALF], values[half * HALF :][:HALF], sums[half])
                    for half in range(2)
                ]
            for (scale, minimum), (part, value, added) in zip(factors, parts, strict=True):
                dot = _dot(part, value, kind.bits, added * T.int32(-kind.center), isa)
                total = fma(T.cast(dot, f"float32x{lanes}"), scale * splat(scale_x, lanes), total, lanes)
                if minimum is not None:
                    total = fma(minimum, splat(T.cast(added, "float32") * scale_x, lanes), total, lanes)
            return total

        def tile(first, count):
            for part in range(BLOCK // lanes):
                at = run(part * lanes, lanes)
                for r in range(count):
                    put(acc, constant(0, lanes), r, run(0, lanes))
                with T.serial(groups) as g:
                    words = weight.words(weights[0], block, g, at, lanes)
                    factors = weight.scales(weights, block, g, at, lanes)
                    for r in range(count):
                        total = add_group(first + r, g, words, factors, acc[r, run(0, lanes)])
                        put(acc, total, r, run(0, lanes))
                for r in range(count):
                    if residual:
                        Output(res, n_out, lanes).load(first + r, block, part, add, (0,))
                        put(acc, acc[r, run(0, lanes)] + add[0, run(0, lanes)], r, run(0, lanes))
                    out.store(first + r, block, part, acc, (r,))

        for_tiles(n, rows, tile)

    if residual and kind.offset is None:

        @T.prim_func(s_tir=True, private=True)
        def linear_q8_add(
            x_h: T.handle,
            w: T.Buffer(codes, "uint32"),
            s: T.Buffer(scales, "float16"),
            res_h: T.handle,
            y_h: T.handle,
        ):
            T.func_attr(ATTRIBUTES)
            n = T.int64()
            x = T.match_buffer(x_h, (n, width), "int32")
            res = T.match_buffer(res_h, (n, n_out), "float32")
            y = T.match_buffer(y_h, (n, n_out), "float32")
            for_blocks(blocks, block_rows, x, (w, s), res, y, n)

        return linear_q8_add

    if residual:

        @T.prim_func(s_tir=True, private=True)
        def linear_q8_offset_add(
            x_h: T.handle,
            w: T.Buffer(codes, "uint32"),
            s: T.Buffer(scales, "float16"),
            z: T.Buffer(scales, "float16"),
            res_h: T.handle,
            y_h: T.handle,
        ):
            T.func_attr(ATTRIBUTES)
            n = T.int64()
            x = T.match_buffer(x_h, (n, width), "int32")
            res = T.match_buffer(res_h, (n, n_out), "float32")
            y = T.match_buffer(y_h, (n, n_out), "float32")
            for_blocks(blocks, block_rows, x, (w, s, z), res, y, n)

        return linear_q8_offset_add

    if kind.offset is None:

        @T.prim_func(s_tir=True, private=True)
        def linear_q8(
            x_h: T.handle, w: T.Buffer(codes, "uint32"), s: T.Buffer(scales, "float16"), y_h: T.handle
        ):
            T.func_attr(ATTRIBUTES)
            n = T.int64()
            x = T.match_buffer(x_h, (n, width), "int32")
            y = T.match_buffer(y_h, (n, n_out), "float32")
            for_blocks(blocks, block_rows, x, (w, s), None, y, n)

        return linear_q8

    @T.prim_func(s_tir=True, private=True)
    def linear_q8_offset(
        x_h: T.handle,
        w: T.Buffer(codes, "uint32"),
        s: T.Buffer(scales, "float16"),
        z: T.Buffer(scales, "float16"),
        y_h: T.handle,
    ):
        T.func_attr(ATTRIBUTES)
        n = T.int64()
        x = T.match_buffer(x_h, (n, width), "int32")
        y = T.match_buffer(y_h, (n, n_out), "float32")
        for_blocks(blocks, block_rows, x, (w, s, z), None, y, n)

    return linear_q8_offset
