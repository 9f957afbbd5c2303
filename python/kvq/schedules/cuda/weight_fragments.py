"""The order of a stored weight for tensor cores, and what puts it there or reads rows of it.

A weight is operand A of ``mma.m16n8k16``: 16 outputs by 16 inputs. A *unit* is 16 outputs by 64 inputs; in it
lane ``4 g + c`` of a warp has the outputs g and g + 8, and of the inputs the sixteen from ``16 c`` on, four
in each of the unit's four products. So the order of the inputs within a unit is another one than the
instruction's, and whoever loads operand B follows it: a lane's values of a row are 32 bytes in one piece.

::

    int4    codes   uint32[tiles, units, 32, 4]     lane, product: the lane's eight codes
            scales  dtype[tiles, units, 2, 8, 2]    group of 32 inputs, g, outputs g and g + 8
    fp16    weight  uint32[tiles, units, 4, 32, 4]  product, lane: the lane's four registers

Of a code word, register p takes the nibbles p and p + 4. Outputs beyond the weight's are zeros.

``dtype`` is that of the operands, fp16 or bf16. What is not codes is rounded to it when the weight is brought
into this order: a weight that was bf16 in the checkpoint stays exact, a scale loses at most 2**-9 of itself.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from kvq.quantization.storage import GROUP, STORAGES
from kvq.schedules.statements import for_threads, put, when

from .block import ATTRIBUTES, WARP
from .mma import u32

#: Outputs of a tile, inputs of a unit and products of a unit.
TILE, UNIT, STEPS = 16, 64, 4
THREADS = 128
#: Storages of weights that have this order.
KINDS = ("int4", "float16")
#: Order of a row's inputs in which those of a product are neighbours, as operand B has them.
OPERAND = "operand"
#: The code of 0.
ZERO_CODE = STORAGES["int4"].center


def fits(k: int, storage: str) -> bool:
    """Whether a weight with ``k`` inputs has this order."""
    return storage in KINDS and k % UNIT == 0


def operand_place(i):
    """Place of input ``i`` of a row in the order :data:`OPERAND`.

    Pair ``8 c + t`` of a unit goes to ``4 t + c``: product ``t // 2`` finds its 16 inputs in the order in
    which ``mma.m16n8k16`` numbers them, the lane's four at 2c, 2c + 1, 2c + 8 and 2c + 9.
    """
    pair = T.shift_right(i, 1)
    within = T.shift_left(T.bitwise_and(pair, 7), 2) + T.bitwise_and(T.shift_right(pair, 3), 3)
    return T.bitwise_and(i, ~(UNIT - 1)) + 2 * within + T.bitwise_and(i, 1)


def tiles(n: int) -> int:
    """Tiles of a weight with ``n`` outputs."""
    return -(-n // TILE)


def codes_shape(n: int, k: int) -> tuple[int, ...]:
    """Shape of the codes of a weight ``[n, k]``."""
    return tiles(n), k // UNIT, WARP, STEPS


def scales_shape(n: int, k: int) -> tuple[int, ...]:
    """Shape of the scales of a weight ``[n, k]``."""
    return tiles(n), k // UNIT, UNIT // GROUP, TILE // 2, 2


def matrix_shape(n: int, k: int) -> tuple[int, ...]:
    """Shape of an unquantized weight ``[n, k]``."""
    return tiles(n), k // UNIT, STEPS, WARP, 4


def stored_tensors(
    storage: str, n: int, k: int, dtype: str = "float16"
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of the tensors of a weight ``[n, k]`` in this order, by name.

    ``dtype`` is that of the operands.
    """
    if storage == "int4":
        return {"codes": (codes_shape(n, k), "uint32"), "scales": (scales_shape(n, k), dtype)}
    return {"weight": (matrix_shape(n, k), "uint32")}


def unit_words(storage: str) -> int:
    """32-bit words of a lane in a unit, scales apart."""
    return STEPS if storage == "int4" else 4 * STEPS


def _place(i, words: int):
    """Of word ``i`` of a tensor in this order: the tile, the unit, and the word within the unit."""
    unit = T.bind(T.truncdiv(i, words))
    return unit, T.bind(i - unit * words)


def _rounded(value, dtype: str):
    """An fp16 number in ``dtype``."""
    return value if dtype == "float16" else T.cast(T.cast(value, "float32"), dtype)


def prepare_codes(n: int, k: int) -> tirx.PrimFunc:
    """Build the kernel from stored codes ``uint32[n, k / 8]`` to this order."""
    units = k // UNIT
    count = tiles(n) * units * WARP * STEPS

    def convert(i, raw, out):
        unit, word = _place(i, WARP * STEPS)
        tile, step = T.bind(T.truncdiv(unit, units)), T.bind(T.bitwise_and(word, STEPS - 1))
        lane = T.bind(T.shift_right(word, 2))
        first = T.bind((unit - tile * units) * UNIT + T.bitwise_and(lane, 3) * 16 + step * 4)
        made = T.alloc_local([1], "uint32")
        put(made, u32(0), 0)
        for half in range(2):
            row = T.bind(tile * TILE + T.shift_right(lane, 2) + 8 * half)

            def add(half=half, row=row):
                stored = raw[row, T.shift_right(first, 3)]
                four = T.bind(T.shift_right(stored, T.cast(T.bitwise_and(first, 4) * 4, "uint32")))
                for j in range(4):
                    code = T.bitwise_and(T.shift_right(four, u32(4 * j)), u32(15))
                    nibble = half + 2 * (j // 2) + 4 * (j % 2)
                    put(made, T.bitwise_or(made[0], T.shift_left(code, u32(4 * nibble))), 0)

            when(row < n, add)
        put(out, made[0], tile, unit - tile * units, lane, step)

    @T.prim_func(private=True)
    def prepare_codes(raw: T.Buffer((n, k // 8), "uint32"), out: T.Buffer(codes_shape(n, k), "uint32")):
        T.func_attr(ATTRIBUTES)
        T.device_entry()
        block = T.cta_id([-(-count // THREADS)])
        thread = T.thread_id([THREADS])
        if block * THREADS + thread < count:
            convert(block * THREADS + thread, raw, out)

    return prepare_codes


def prepare_scales(n: int, k: int, dtype: str = "float16") -> tirx.PrimFunc:
    """Build the kernel from stored scales ``float16[n, k / 32]`` to this order, in ``dtype``."""
    units, per_unit = k // UNIT, UNIT // GROUP * TILE
    count = tiles(n) * units * per_unit

    def convert(i, raw, out):
        unit, word = _place(i, per_unit)
        tile = T.bind(T.truncdiv(unit, units))
        group, rest = T.bind(T.shift_right(word, 4)), T.bind(T.bitwise_and(word, TILE - 1))
        g, half = T.bind(T.shift_right(rest, 1)), T.bind(T.bitwise_and(rest, 1))
        row, at = T.bind(tile * TILE + g + 8 * half), T.bind(unit - tile * units)
        with T.If(row < n):
            with T.Then():
                scale = _rounded(raw[row, at * (UNIT // GROUP) + group], dtype)
                put(out, scale, tile, at, group, g, half)
            with T.Else():
                put(out, _rounded(T.float16(0), dtype), tile, at, group, g, half)

    @T.prim_func(private=True)
    def prepare_scales(raw: T.Buffer((n, k // GROUP), "float16"), out: T.Buffer(scales_shape(n, k), dtype)):
        T.func_attr(ATTRIBUTES)
        T.device_entry()
        block = T.cta_id([-(-count // THREADS)])
        thread = T.thread_id([THREADS])
        if block * THREADS + thread < count:
            convert(block * THREADS + thread, raw, out)

    return prepare_scales


def prepare_matrix(n: int, k: int, dtype: str = "float16") -> tirx.PrimFunc:
    """Build the kernel from a stored weight ``float16[n, k]`` to this order, in ``dtype``."""
    units, per_unit = k // UNIT, STEPS * WARP * 4
    count = tiles(n) * units * per_unit

    def convert(i, raw, out):
        unit, word = _place(i, per_unit)
        tile = T.bind(T.truncdiv(unit, units))
        step, lane = T.bind(T.shift_right(word, 7)), T.bind(T.bitwise_and(T.shift_right(word, 2), WARP - 1))
        p = T.bind(T.bitwise_and(word, 3))
        row = T.bind(tile * TILE + T.shift_right(lane, 2) + 8 * T.bitwise_and(p, 1))
        at = T.bind(unit - tile * units)
        first = T.bind(at * UNIT + T.bitwise_and(lane, 3) * 16 + step * 4 + T.bitwise_and(p, 2))
        made = T.alloc_local([2], dtype)
        for half in range(2):
            put(made, _rounded(T.float16(0), dtype), half)

        def read():
            for half in range(2):
                put(made, _rounded(raw[row, first + half], dtype), half)

        when(row < n, read)
        put(out, made.view("uint32")[0], tile, at, step, lane, p)

    @T.prim_func(private=True)
    def prepare_matrix(raw: T.Buffer((n, k), "float16"), out: T.Buffer(matrix_shape(n, k), "uint32")):
        T.func_attr(ATTRIBUTES)
        T.device_entry()
        block = T.cta_id([-(-count // THREADS)])
        thread = T.thread_id([THREADS])
        if block * THREADS + thread < count:
            convert(block * THREADS + thread, raw, out)

    return prepare_matrix


def embedding(n: int, k: int, storage: str, dtype: str = "float16") -> tirx.PrimFunc:
    """Build the kernel that reads rows of a weight in this order, made for operands in ``dtype``, as float32.

    Arguments of the kernel: ids ``int32[m]``, the tensors of the weight, out ``float32[m, k]``.
    """

    def place(ids, i, quad):
        """Of the four inputs from ``4 quad`` on: tile, unit, group, g, half, lane and product."""
        row = T.bind(T.max(T.min(ids[i], n - 1), 0))
        within = T.bind(T.bitwise_and(row, TILE - 1))
        g, half = T.bind(T.bitwise_and(within, 7)), T.bind(T.shift_right(within, 3))
        c = T.bind(T.bitwise_and(T.shift_right(quad, 2), 3))
        lane, step = T.bind(4 * g + c), T.bind(T.bitwise_and(quad, STEPS - 1))
        return T.shift_right(row, 4), T.shift_right(quad, 4), T.shift_right(c, 1), g, half, lane, step

    def read_int4(ids, codes, scales, out, i, thread):
        def read(quad):
            tile, unit, group, g, half, lane, step = place(ids, i, quad)
            word = T.bind(T.shift_right(codes[tile, unit, lane, step], T.cast(4 * half, "uint32")))
            scale = T.bind(T.cast(scales[tile, unit, group, g, half], "float32"))
            for j in range(4):
                code = T.bitwise_and(T.shift_right(word, u32(4 * (2 * (j // 2) + 4 * (j % 2)))), u32(15))
                put(out, (T.cast(T.cast(code, "int32") - ZERO_CODE, "float32")) * scale, i, quad * 4 + j)

        for_threads(k // 4, thread, THREADS, read)

    def read_matrix(ids, weight, out, i, thread):
        pair = T.alloc_local([1], "uint32")

        def read(quad):
            tile, unit, _, _, half, lane, step = place(ids, i, quad)
            for second in range(2):
                put(pair, weight[tile, unit, step, lane, half + 2 * second], 0)
                for half_of_pair in range(2):
                    value = T.cast(pair.view(dtype)[half_of_pair], "float32")
                    put(out, value, i, quad * 4 + 2 * second + half_of_pair)

        for_threads(k // 4, thread, THREADS, read)

    if storage == "int4":

        @T.prim_func(private=True)
        def embedding_int4(
            ids_h: T.handle,
            codes: T.Buffer(codes_shape(n, k), "uint32"),
            scales: T.Buffer(scales_shape(n, k), dtype),
            out_h: T.handle,
        ):
            T.func_attr(ATTRIBUTES)
            m = T.int64()
            ids = T.match_buffer(ids_h, (m,), "int32")
            out = T.match_buffer(out_h, (m, k), "float32")
            T.device_entry()
            i = T.cta_id([T.cast(m, "int32")])
            thread = T.thread_id([THREADS])
            read_int4(ids, codes, scales, out, i, thread)

        return embedding_int4

    @T.prim_func(private=True)
    def embedding_matrix(ids_h: T.handle, weight: T.Buffer(matrix_shape(n, k), "uint32"), out_h: T.handle):
        T.func_attr(ATTRIBUTES)
        m = T.int64()
        ids = T.match_buffer(ids_h, (m,), "int32")
        out = T.match_buffer(out_h, (m, k), "float32")
        T.device_entry()
        i = T.cta_id([T.cast(m, "int32")])
        thread = T.thread_id([THREADS])
        read_matrix(ids, weight, out, i, thread)

    return embedding_matrix
