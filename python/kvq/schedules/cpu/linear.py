"""Matrix products with the weights of a model, ``y[n, N] = x[n, K] @ w[N, K].T``.

Weights lie in blocks of 16 output rows so that rows sit in lanes:

``int4``      codes ``uint32[N/16, K/32, 4, 16]``: byte ``b`` of word ``w`` holds input ``4w + b`` of a group
              in its low half and input ``16 + 4w + b`` in its high half; scales ``float16[N/16, K/32, 16]``.
``float``     ``[N/16, K, 16]`` in the stored dtype.

Two kernels share them. ``linear_int8`` multiplies int4 codes by activations quantized to int8 per group of
32 (``quantize_rows``): the sum inside a group is exact in integers, whatever instruction computes it.
``linear_float`` uses the activations as they are: each block of weights becomes float32 once, for all
rows. In both, a row's sum runs over the inputs in order, so a row has the same bits alone or in a
tile. The last block is padded with zeros where N is no multiple of 16.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from .vector import CpuIsa, constant, fma, for_rows, intrinsic, put, reduce_lanes, rint, run, splat

#: Output rows of a block of weights.
BLOCK = 16
#: Inputs that share one weight scale, and one activation scale.
GROUP = 32
#: Zero point of the int4 weight codes.
ZERO = 7
#: Inputs of a block of weights that are float32 at a time in ``linear_float``.
CHUNK = 512


def num_blocks(n: int) -> int:
    """Blocks of 16 output rows."""
    return -(-n // BLOCK)


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
            for block in T.parallel(blocks):
                with T.sblock("block"):
                    vb = T.axis.spatial(blocks, block)
                    T.reads()
                    T.writes()
                    block_rows(vb, x, w, s, res, y, n)

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
        for block in T.parallel(blocks):
            with T.sblock("block"):
                vb = T.axis.spatial(blocks, block)
                T.reads()
                T.writes()
                block_rows(vb, x, w, s, None, y, n)

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
            for block in T.parallel(blocks):
                with T.sblock("block"):
                    vb = T.axis.spatial(blocks, block)
                    T.reads()
                    T.writes()
                    block_rows(vb, x, (w, s), y, n)

        return linear_int4_exact

    @T.prim_func(s_tir=True, private=True)
    def linear_float(x_h: T.handle, w: T.Buffer((blocks, k, BLOCK), dtype), y_h: T.handle):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        n = T.int64()
        x = T.match_buffer(x_h, (n, k), "float32")
        y = T.match_buffer(y_h, (n, n_out), "float32")
        for block in T.parallel(blocks):
            with T.sblock("block"):
                vb = T.axis.spatial(blocks, block)
                T.reads()
                T.writes()
                block_rows(vb, x, (w,), y, n)

    return linear_float


def embedding(n_out: int, k: int, dtype: str, isa: CpuIsa) -> tirx.PrimFunc:
    """Build the kernel that reads rows of a weight in block layout, as float32.

    Arguments of the kernel: ids ``int32[n]``, the tensors of the weight, out ``float32[n, K]``.
    """
    blocks, groups = num_blocks(n_out), k // GROUP

    def where(ids, i):
        row = T.bind(T.max(T.min(T.cast(ids[i], "int64"), T.int64(n_out - 1)), T.int64(0)))
        return T.bind(T.truncdiv(row, T.int64(BLOCK))), T.bind(T.truncmod(row, T.int64(BLOCK)))

    def int4_row(i, ids, w, s, out):
        block, lane = where(ids, i)
        with T.serial(groups) as g, T.serial(4) as word:
            scale = T.bind(T.cast(s[block, g, lane], "float32"))
            packed = T.bind(w[block, g, word, lane])
            for half in range(2):
                for byte in range(4):
                    code = T.bitwise_and(T.shift_right(packed, T.uint32(8 * byte + 4 * half)), T.uint32(15))
                    value = T.cast(T.cast(code, "int32") - ZERO, "float32") * scale
                    put(out, value, i, g * GROUP + half * 16 + word * 4 + byte)

    def float_row(i, ids, w, out):
        block, lane = where(ids, i)
        with T.serial(k) as j:
            put(out, T.cast(w[block, j, lane], "float32"), i, j)

    if dtype == "int4":

        @T.prim_func(s_tir=True, private=True)
        def embedding_int4(
            ids_h: T.handle,
            w: T.Buffer((blocks, groups, 4, BLOCK), "uint32"),
            s: T.Buffer((blocks, groups, BLOCK), "float16"),
            out_h: T.handle,
        ):
            T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
            n = T.int64()
            ids = T.match_buffer(ids_h, (n,), "int32")
            out = T.match_buffer(out_h, (n, k), "float32")
            for_rows(n, int4_row, ids, w, s, out)

        return embedding_int4

    @T.prim_func(s_tir=True, private=True)
    def embedding_float(ids_h: T.handle, w: T.Buffer((blocks, k, BLOCK), dtype), out_h: T.handle):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        n = T.int64()
        ids = T.match_buffer(ids_h, (n,), "int32")
        out = T.match_buffer(out_h, (n, k), "float32")
        for_rows(n, float_row, ids, w, out)

    return embedding_float


def prepare_int4_codes(n_out: int, k: int) -> tirx.PrimFunc:
    """Build the kernel from stored codes ``uint32[N, K/8]`` (code j of word i = input 8i + j) to blocks."""
    blocks, groups = num_blocks(n_out), k // GROUP

    def block_codes(block, raw, out):
        with T.serial(groups) as g, T.serial(4) as word, T.serial(BLOCK) as lane:
            row = T.bind(block * BLOCK + lane)
            stored = T.bind(T.min(row, n_out - 1))
            packed = T.uint32(0)
            for half in range(2):
                source = raw[stored, g * 4 + half * 2 + T.truncdiv(word, 2)]
                for byte in range(4):
                    shift = T.cast(T.truncmod(word, 2) * 16 + byte * 4, "uint32")
                    code = T.bitwise_and(T.shift_right(source, shift), T.uint32(15))
                    packed = T.bitwise_or(packed, T.shift_left(code, T.uint32(8 * byte + 4 * half)))
            put(out, T.Select(row < n_out, packed, T.uint32(0)), block, g, word, lane)

    @T.prim_func(s_tir=True, private=True)
    def prepare_int4_codes(
        raw: T.Buffer((n_out, k // 8), "uint32"), out: T.Buffer((blocks, groups, 4, BLOCK), "uint32")
    ):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        for block in T.parallel(blocks):
            with T.sblock("block"):
                vb = T.axis.spatial(blocks, block)
                T.reads()
                T.writes()
                block_codes(vb, raw, out)

    return prepare_int4_codes


def prepare_blocks(n_out: int, columns: int, dtype: str) -> tirx.PrimFunc:
    """Build the kernel from a stored matrix ``[N, columns]`` to ``[N/16, columns, 16]``, zero padded."""
    blocks = num_blocks(n_out)

    @T.prim_func(s_tir=True, private=True)
    def prepare_blocks(
        raw: T.Buffer((n_out, columns), dtype), out: T.Buffer((blocks, columns, BLOCK), dtype)
    ):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        for block in T.parallel(blocks):
            for column in T.serial(columns):
                for lane in T.serial(BLOCK):
                    with T.sblock("element"):
                        vb, vc, vl = T.axis.remap("SSS", [block, column, lane])
                        T.reads()
                        T.writes()
                        row: T.let = vb * BLOCK + vl
                        value: T.let = raw[T.min(row, n_out - 1), vc]
                        out[vb, vc, vl] = T.Select(row < n_out, value, T.cast(0, dtype))

    return prepare_blocks


def prepare_vector(n: int, dtype: str) -> tirx.PrimFunc:
    """Build the kernel from a stored vector ``dtype[n]`` to float32."""

    @T.prim_func(s_tir=True, private=True)
    def prepare_vector(raw: T.Buffer((n,), dtype), out: T.Buffer((n,), "float32")):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        for i in T.serial(n):
            with T.sblock("element"):
                vi = T.axis.spatial(n, i)
                T.reads()
                T.writes()
                out[vi] = T.cast(raw[vi], "float32")

    return prepare_vector
