"""Matrix products with the weights of a model, and rows of them: weights stay as they are stored.

A warp makes four outputs for up to eight rows. Its lanes hold eight neighbouring inputs each, so a warp reads
256 inputs of a weight row at once; their partial sums meet at the end. The order of a sum depends on K
alone, whatever the number of rows: a row has the same bits in prefill, in decode and in every batch.
"""

from __future__ import annotations

from functools import partial

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.errors import CompileError
from kvq.quantization.storage import STORAGES, Storage
from kvq.schedules.statements import for_threads, put, run, when

from .block import ATTRIBUTES, WARP, add, reduce_warp, sync

THREADS = 128
#: Outputs of a warp and rows of a block.
OUTPUTS, ROWS = 4, 8
#: Inputs that a lane holds at a time, and vectors of them between two waits.
VECTOR, STEPS = 8, 2
#: float32 whose lowest bits are the code: 2**23 + code.
_MAGIC, _MAGIC_ZERO = 0x4B000000, float(2**23)

_CHUNK = WARP * VECTOR * STEPS
_BLOCK_OUTPUTS = OUTPUTS * THREADS // WARP


def _load_codes(kind: Storage, codes, scales, offsets, row, vector, out) -> None:
    """Eight dequantized weights of ``row`` to ``out[8]``; ``offsets`` is None where the storage has none."""
    group = T.truncdiv(vector, kind.group // VECTOR)
    scale = T.bind(T.cast(scales[row, group], "float32"))
    offset = None if offsets is None else T.bind(T.cast(offsets[row, group], "float32"))
    words = [T.bind(codes[row, vector * (kind.bits // 4) + i]) for i in range(kind.bits // 4)]
    for i in range(VECTOR):
        word, at = divmod(i, kind.codes_per_word)
        code = T.bitwise_and(T.shift_right(words[word], T.uint32(kind.bits * at)), T.uint32(2**kind.bits - 1))
        number = T.reinterpret("float32", T.bitwise_or(code, T.uint32(_MAGIC)))
        number = number - T.float32(_MAGIC_ZERO + kind.center)
        if kind.offset == "zero":
            number = number - offset
        value = number * scale
        put(out, value + offset if kind.offset == "min" else value, i)


def _load_float(weight, row, vector, out) -> None:
    """Eight weights of ``row`` to ``out[8]``."""
    for half in range(2):
        value = weight[row, run(vector * VECTOR + half * 4, 4)]
        put(out, T.cast(value, "float32x4"), run(half * 4, 4))


def _multiply(load, x, tile, out, rows, first_output, first_row, n, k: int, n_out: int, thread) -> None:
    """The block's outputs for ``rows`` (static) rows from ``first_row``."""
    lane = T.bind(T.bitwise_and(thread, WARP - 1))
    vectors = k // VECTOR
    acc = T.alloc_local((rows, OUTPUTS), "float32")
    weight = T.alloc_local((VECTOR,), "float32")
    part = T.alloc_local((rows, VECTOR), "float32")
    for r in range(rows):
        for o in range(OUTPUTS):
            put(acc, T.float32(0), r, o)
    with T.serial(-(-k // _CHUNK)) as chunk:
        sync()

        def fill(i):
            """Four inputs of a row: neighbouring lanes then read neighbouring 16 bytes."""
            row, at = i // (_CHUNK // 4), i % (_CHUNK // 4)
            source = T.bind(chunk * _CHUNK + at * 4)
            inside = T.And(source < k, first_row + row < n)
            value = T.if_then_else(inside, x[first_row + row, run(source, 4)], T.broadcast(T.float32(0), 4))
            put(tile, value, row, at % 2, run(at // 2 * 4, 4))

        for_threads(rows * _CHUNK // 4, thread, THREADS, fill)
        sync()
        with T.serial(STEPS) as step:
            vector = T.bind((chunk * STEPS + step) * WARP + lane)

            def add_vector(step=step, vector=vector):
                for r in range(rows):
                    for half in range(2):
                        value = tile[r, half, run((step * WARP + lane) * 4, 4)]
                        put(part, value, r, run(half * 4, 4))
                with T.unroll(OUTPUTS) as o:
                    load(T.bind(T.min(first_output + o, n_out - 1)), vector, weight)
                    for i in range(VECTOR):
                        for r in range(rows):
                            put(acc, acc[r, o] + weight[i] * part[r, i], r, o)

            when(vector < vectors, add_vector)
    for r in range(rows):
        for o in range(OUTPUTS):
            total = reduce_warp(add, acc[r, o])
            mine = lane == r * OUTPUTS + o
            inside = T.And(first_output + o < n_out, first_row + r < n)
            when(
                T.And(mine, inside),
                lambda r=r, o=o, total=total: put(out, total, first_row + r, first_output + o),
            )


def linear(n_out: int, k: int, storage: str) -> tirx.PrimFunc:
    """Build ``out = x @ w.T`` for a weight of any storage.

    Arguments of the kernel: x ``float32[n, K]``, the tensors of the weight as stored, out ``float32[n, N]``.

    Raises
    ------
    CompileError
        If K is no multiple of 8.
    """
    if k % VECTOR:
        raise CompileError(f"a weight with {k} inputs cannot be compiled for CUDA: no multiple of {VECTOR}")
    columns, kind = -(-n_out // _BLOCK_OUTPUTS), STORAGES[storage]

    def block(load, x, out, n, column, row, thread):
        tile = T.alloc_shared((ROWS, 2, _CHUNK // 2), "float32", align=128)
        first_output = T.bind(column * _BLOCK_OUTPUTS + T.shift_right(thread, 5) * OUTPUTS)
        first_row = T.bind(row * ROWS)
        with T.If(n - first_row == 1):
            for rows, branch in ((1, T.Then), (ROWS, T.Else)):
                with branch():
                    _multiply(load, x, tile, out, rows, first_output, first_row, n, k, n_out, thread)

    def row_blocks(n):
        return T.truncdiv(T.cast(n, "int32") + (ROWS - 1), ROWS)

    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        n = IRBuilder.name("n", T.int64())
        x = builder.arg("x", T.Buffer((n, k), "float32"))
        load = _load_of(kind, n_out, k, storage)
        out = builder.arg("out", T.Buffer((n, n_out), "float32"))
        T.device_entry()
        column, row = T.cta_id([columns, row_blocks(n)])
        thread = T.thread_id([THREADS])
        block(load, x, out, T.cast(n, "int32"), column, row, thread)
    return script.get()


def _load_of(kind: Storage, n_out: int, k: int, storage: str):
    """Declare the tensors of a weight as arguments of the kernel; returns what reads a vector of it."""
    if kind.bits is None:
        return partial(_load_float, builder.arg("weight", T.Buffer((n_out, k), storage)))
    groups = (n_out, k // kind.group)
    codes = builder.arg("w", T.Buffer((n_out, k * kind.bits // 32), "uint32"))
    scales = builder.arg("s", T.Buffer(groups, "float16"))
    offsets = builder.arg("z", T.Buffer(groups, "float16")) if kind.offset is not None else None
    return partial(_load_codes, kind, codes, scales, offsets)


def embedding(n_out: int, k: int, storage: str) -> tirx.PrimFunc:
    """Build the kernel that reads rows of a stored weight, as float32.

    Arguments of the kernel: ids ``int32[n]``, the tensors of the weight, out ``float32[n, K]``.
    """
    kind = STORAGES[storage]

    def read_row(load, ids, out, i, thread):
        row = T.bind(T.max(T.min(ids[i], n_out - 1), 0))
        weight = T.alloc_local((VECTOR,), "float32")

        def read(vector):
            load(row, vector, weight)
            for half in range(2):
                put(out, weight[run(half * 4, 4)], i, run(vector * VECTOR + half * 4, 4))

        for_threads(k // VECTOR, thread, THREADS, read)

    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        n = IRBuilder.name("n", T.int64())
        ids = builder.arg("ids", T.Buffer((n,), "int32"))
        load = _load_of(kind, n_out, k, storage)
        out = builder.arg("out", T.Buffer((n, k), "float32"))
        T.device_entry()
        i = T.cta_id([T.cast(n, "int32")])
        thread = T.thread_id([THREADS])
        read_row(load, ids, out, i, thread)
    return script.get()


def prepare_vector(n: int, dtype: str) -> tirx.PrimFunc:
    """Build the kernel from a stored vector ``dtype[n]`` to float32."""

    def convert(block, thread, raw, out):
        i = T.bind(block * THREADS + thread)
        when(i < n, lambda: put(out, T.cast(raw[i], "float32"), i))

    @T.prim_func(private=True)
    def prepare_vector(raw: T.Buffer((n,), dtype), out: T.Buffer((n,), "float32")):
        T.func_attr(ATTRIBUTES)
        T.device_entry()
        block = T.cta_id([-(-n // THREADS)])
        thread = T.thread_id([THREADS])
        convert(block, thread, raw, out)

    return prepare_vector
