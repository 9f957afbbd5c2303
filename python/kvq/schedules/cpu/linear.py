"""Matrix products with the weights of a model, ``y[n, N] = x[n, K] @ w[N, K].T``.

``linear_int8`` multiplies int4 codes by int8 activations (``activations.py``): the sum inside a group is
exact in integers, whatever instruction computes it. ``linear_float`` uses the activations as they are: each
block of weights becomes float32 once, for all rows. In both, a row's sum runs over the inputs in order, so a
row has the same bits alone or in a tile. Weights lie in blocks of 16 output rows (``weight_blocks.py``).
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from .activations import quantized_width
from .vector import CpuIsa, constant, fma, for_blocks, intrinsic, put, run, splat
from .weight_blocks import BLOCK, GROUP, ZERO, num_blocks

#: Inputs of a block of weights that are float32 at a time in ``linear_float``.
CHUNK = 512


def _group_dot(low, high, x, offset, isa: CpuIsa):
    """Sum over a group of int4 codes times int8 activations, plus ``offset``, in int32 lanes.

    ``low`` and ``high`` are four uint32 vectors each, every byte one code; ``x[j]`` is the scalar int32
    with the four activations that meet ``low[j]`` (j < 4) or ``high[j - 4]``.
    """
    lanes = isa.lanes
    pairs = list(zip([*low, *high], x, strict=True))
    if isa.dot == "vnni512":
        total = splat(offset, lanes)
        for code, value in pairs:
            total = intrinsic(
                "llvm.x86.avx512.vpdpbusd.512",
                "int32x16",
                total,
                T.reinterpret("int8x64", code),
                T.reinterpret("int8x64", splat(value, lanes)),
            )
        return total
    if isa.dot == "maddubs":
        # eight products of at most 2 * 15 * 127 each fit int16
        total = None
        for code, value in pairs:
            products = intrinsic(
                "llvm.x86.avx2.pmadd.ub.sw",
                "int16x16",
                T.reinterpret("int8x32", code),
                T.reinterpret("int8x32", splat(value, lanes)),
            )
            total = products if total is None else total + products
        ones = splat(T.int16(1), 16)
        return intrinsic("llvm.x86.avx2.pmadd.wd", "int32x8", total, ones) + splat(offset, lanes)
    total = splat(offset, lanes)
    for code, value in pairs:
        for byte in range(4):
            c = T.bitwise_and(
                T.shift_right(code, splat(T.uint32(8 * byte), lanes)), splat(T.uint32(15), lanes)
            )
            signed = T.shift_right(T.shift_left(value, T.int32(24 - 8 * byte)), T.int32(24))
            total = total + T.reinterpret(f"int32x{lanes}", c) * splat(signed, lanes)
    return total


class _Output:
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


def _for_tiles(n, rows: int, tile) -> None:
    """Emit ``tile(first_row, rows)`` over all rows, then one by one over what is left."""
    whole = T.bind(T.truncdiv(n, T.int64(rows)))
    with T.serial(whole) as i:
        tile(i * rows, rows)
    with T.serial(n - whole * rows) as i:
        tile(whole * rows + i, 1)


def linear_int8(n_out: int, k: int, isa: CpuIsa, residual: bool = False) -> tirx.PrimFunc:
    """Build the product of int8 activations with int4 weights, plus a residual if asked.

    Arguments of the kernel: quantized rows ``int32[n, quantized_width(K)]``, weight codes and scales (module
    docstring), the residual ``float32[n, N]`` if there is one, y ``float32[n, N]``.
    """
    blocks, groups, lanes, width = num_blocks(n_out), k // GROUP, isa.lanes, quantized_width(k)
    rows = 8 if lanes == 16 else 4

    def block_rows(block, x, w, s, res, y, n):
        out = _Output(y, n_out, lanes)
        acc = T.sblock_alloc_buffer((rows, lanes), "float32")
        add = T.sblock_alloc_buffer((1, lanes), "float32")

        def tile(first, count):
            for part in range(BLOCK // lanes):
                at = run(part * lanes, lanes)
                for r in range(count):
                    put(acc, constant(0, lanes), r, run(0, lanes))
                with T.serial(groups) as g:
                    words = [T.bind(w[block, g, j, at]) for j in range(4)]
                    mask = splat(T.uint32(0x0F0F0F0F), lanes)
                    low = [T.bind(T.bitwise_and(word, mask)) for word in words]
                    shifted = [T.shift_right(word, splat(T.uint32(4), lanes)) for word in words]
                    high = [T.bind(T.bitwise_and(word, mask)) for word in shifted]
                    scale = T.bind(T.cast(s[block, g, at], f"float32x{lanes}"))
                    for r in range(count):
                        row = first + r
                        codes = [x[row, g * (GROUP // 4) + j] for j in range(GROUP // 4)]
                        dot = _group_dot(low, high, codes, x[row, g + (k // 4 + groups)], isa)
                        factor = scale * splat(T.reinterpret("float32", x[row, g + k // 4]), lanes)
                        total = fma(T.cast(dot, f"float32x{lanes}"), factor, acc[r, run(0, lanes)], lanes)
                        put(acc, total, r, run(0, lanes))
                for r in range(count):
                    if residual:
                        _Output(res, n_out, lanes).load(first + r, block, part, add, (0,))
                        put(acc, acc[r, run(0, lanes)] + add[0, run(0, lanes)], r, run(0, lanes))
                    out.store(first + r, block, part, acc, (r,))

        _for_tiles(n, rows, tile)

    if residual:

        @T.prim_func(s_tir=True, private=True)
        def linear_int8_add(
            x_h: T.handle,
            w: T.Buffer((blocks, groups, 4, BLOCK), "uint32"),
            s: T.Buffer((blocks, groups, BLOCK), "float16"),
            res_h: T.handle,
            y_h: T.handle,
        ):
            T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
            n = T.int64()
            x = T.match_buffer(x_h, (n, width), "int32")
            res = T.match_buffer(res_h, (n, n_out), "float32")
            y = T.match_buffer(y_h, (n, n_out), "float32")
            for_blocks(blocks, block_rows, x, w, s, res, y, n)

        return linear_int8_add

    @T.prim_func(s_tir=True, private=True)
    def linear_int8(
        x_h: T.handle,
        w: T.Buffer((blocks, groups, 4, BLOCK), "uint32"),
        s: T.Buffer((blocks, groups, BLOCK), "float16"),
        y_h: T.handle,
    ):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        n = T.int64()
        x = T.match_buffer(x_h, (n, width), "int32")
        y = T.match_buffer(y_h, (n, n_out), "float32")
        for_blocks(blocks, block_rows, x, w, s, None, y, n)

    return linear_int8


def _dequantize_int4(weights, block, start, count: int, out, isa: CpuIsa) -> None:
    """Inputs ``start .. start + count`` of a block of int4 weights, to ``out[count * 16]`` float32."""
    w, s = weights
    lanes = isa.lanes
    with T.serial(count // GROUP) as j:
        g = T.bind(T.truncdiv(start, GROUP) + j)
        for part in range(BLOCK // lanes):
            at = run(part * lanes, lanes)
            scale = T.bind(T.cast(s[block, g, at], f"float32x{lanes}"))
            for i in range(GROUP):
                half, word, byte = i // 16, i % 16 // 4, i % 4
                shifted = T.shift_right(w[block, g, word, at], splat(T.uint32(8 * byte + 4 * half), lanes))
                code = T.reinterpret(f"int32x{lanes}", T.bitwise_and(shifted, splat(T.uint32(15), lanes)))
                value = T.cast(code - splat(T.int32(ZERO), lanes), f"float32x{lanes}") * scale
                put(out, value, run((j * GROUP + i) * BLOCK + part * lanes, lanes))


def _convert_float(weights, block, start, count: int, out, isa: CpuIsa) -> None:
    """The same for weights that are stored as they are."""
    (w,) = weights
    lanes = isa.lanes
    with T.serial(count) as i:
        for part in range(BLOCK // lanes):
            value = T.cast(w[block, start + i, run(part * lanes, lanes)], f"float32x{lanes}")
            put(out, value, run(i * BLOCK + part * lanes, lanes))


def linear_float(n_out: int, k: int, dtype: str, isa: CpuIsa) -> tirx.PrimFunc:
    """Build the product of float32 activations with weights stored as ``int4``, ``float16`` or ``float32``.

    Arguments of the kernel: x ``float32[n, K]``, the tensors of the weight (module docstring), y
    ``float32[n, N]``.
    """
    blocks, groups, lanes = num_blocks(n_out), k // GROUP, isa.lanes
    rows = 8 if lanes == 16 else 4
    parts = BLOCK // lanes
    to_float = _dequantize_int4 if dtype == "int4" else _convert_float

    def block_rows(block, x, weights, y, n):
        out = _Output(y, n_out, lanes)
        acc = T.sblock_alloc_buffer((rows, parts, lanes), "float32")
        wt = T.sblock_alloc_buffer((min(k, CHUNK) * BLOCK,), "float32")

        def chunk(start, count: int, is_first):
            to_float(weights, block, start, count, wt, isa)

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
                        weight = T.bind(wt[run(i * BLOCK + part * lanes, lanes)])
                        for r in range(num):
                            total = fma(value[r], weight, acc[r, part, run(0, lanes)], lanes)
                            put(acc, total, r, part, run(0, lanes))
                for r in range(num):
                    for part in range(parts):
                        out.store(first + r, block, part, acc, (r, part))

            _for_tiles(n, rows, tile)

        whole = k // CHUNK
        if whole:
            with T.serial(whole) as c:
                chunk(c * CHUNK, CHUNK, c == 0)
        if k % CHUNK:
            chunk(whole * CHUNK, k % CHUNK, T.bool(whole == 0))

    if dtype == "int4":

        @T.prim_func(s_tir=True, private=True)
        def linear_int4_exact(
            x_h: T.handle,
            w: T.Buffer((blocks, groups, 4, BLOCK), "uint32"),
            s: T.Buffer((blocks, groups, BLOCK), "float16"),
            y_h: T.handle,
        ):
            T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
            n = T.int64()
            x = T.match_buffer(x_h, (n, k), "float32")
            y = T.match_buffer(y_h, (n, n_out), "float32")
            for_blocks(blocks, block_rows, x, (w, s), y, n)

        return linear_int4_exact

    @T.prim_func(s_tir=True, private=True)
    def linear_float(x_h: T.handle, w: T.Buffer((blocks, k, BLOCK), dtype), y_h: T.handle):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        n = T.int64()
        x = T.match_buffer(x_h, (n, k), "float32")
        y = T.match_buffer(y_h, (n, n_out), "float32")
        for_blocks(blocks, block_rows, x, (w,), y, n)

    return linear_float
