"""Normalization, the gated activation, and rounding: float32 rows in, rows for the next product out.

Four neighbouring numbers at a time, each read once. What the tensor cores take is rounded here: to fp16,
where a magnitude beyond its range becomes the largest, or to bf16, which has the range of float32. With
``overlap`` a kernel starts while the one before it runs; ``order`` is that of a rounded row's numbers.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from kvq.schedules.gelu import GELU_CUBIC, GELU_SCALE
from kvq.schedules.statements import put, run, when

from .block import WARP, add, kernel_attributes, let_next_start, libm, reduce_block, wait_for_rows
from .weight_fragments import OPERAND, operand_place

#: Most threads of a row's block, and threads of a block that takes a piece of a row.
ROW_THREADS, THREADS = 1024, 256
_FP16_MAX = 65504.0


def _width(dim: int) -> int:
    """Neighbouring numbers that a thread takes."""
    return 4 if dim % 4 == 0 else 1


def activate(value, activation: str):
    """``silu`` or ``gelu_tanh`` of a float32."""
    s = value
    if activation == "gelu_tanh":
        s = value * T.float32(GELU_SCALE) * (T.float32(1) + T.float32(GELU_CUBIC) * value * value)
    return value * (T.float32(1) / (T.float32(1) + libm("expf", T.float32(0) - s)))


def rounded(value, dtype: str):
    """A float32 as ``dtype``; NaN stays NaN."""
    if dtype == "float32":
        return value
    if dtype == "float16":
        value, most = T.bind(value), T.float32(_FP16_MAX)
        value = T.Select(value > most, most, T.Select(value < -most, -most, value))
    return T.cast(value, dtype)


def put_rounded(out, value, dtype: str, order: str, row, at) -> None:
    """Store a float32 as ``dtype``, number ``at`` of a row in an order."""
    put(out, rounded(value, dtype), row, operand_place(at) if order == OPERAND else at)


def rms_norm(
    dim: int, eps: float, dtype: str = "float32", overlap: bool = False, order: str = ""
) -> tirx.PrimFunc:
    """Build ``out = x / sqrt(mean(x**2) + eps) * weight``: a block a row, which stays in registers.

    Arguments of the kernel: x ``float32[n, dim]``, weight ``float32[dim]``, out ``dtype[n, dim]``.
    """
    width = _width(dim)
    vectors = dim // width
    threads = min(ROW_THREADS, -(-vectors // WARP) * WARP)
    held = -(-vectors // threads)

    def norm_row(row, thread, x, weight, out):
        shared = T.alloc_shared((max(threads // WARP, 1),), "float32")
        acc = T.alloc_local((1,), "float32")
        line = T.alloc_local((held * width,), "float32")
        put(acc, T.float32(0), 0)

        def each(body):
            for step in range(held):
                at = T.bind(thread + step * threads)
                if (step + 1) * threads <= vectors:
                    body(step, at)
                else:
                    when(at < vectors, lambda step=step, at=at: body(step, at))

        def read(step, at):
            put(line, x[row, run(at * width, width)], run(step * width, width))
            for i in range(width):
                value = line[step * width + i]
                put(acc, acc[0] + value * value, 0)

        each(read)
        total = reduce_block(add, acc[0], thread, threads, shared)
        factor = T.bind(T.float32(1) / T.sqrt(total / T.float32(dim) + T.float32(eps)))
        gain = T.alloc_local((width,), "float32")

        def write(step, at):
            put(gain, weight[run(at * width, width)], run(0, width))
            for i in range(width):
                value = line[step * width + i] * factor * gain[i]
                put_rounded(out, value, dtype, order, row, at * width + i)

        each(write)

    @T.prim_func(private=True)
    def rms_norm(x_h: T.handle, weight: T.Buffer((dim,), "float32"), out_h: T.handle):
        T.func_attr(kernel_attributes(overlap))
        n = T.int64()
        x = T.match_buffer(x_h, (n, dim), "float32")
        out = T.match_buffer(out_h, (n, dim), dtype)
        T.device_entry()
        row = T.cta_id([T.cast(n, "int32")])
        thread = T.thread_id([threads])
        let_next_start(overlap)
        wait_for_rows(overlap)
        norm_row(row, thread, x, weight, out)

    return rms_norm


def gate(
    dim: int, activation: str, dtype: str = "float32", overlap: bool = False, order: str = ""
) -> tirx.PrimFunc:
    """Build ``out = act(x[:, :dim]) * x[:, dim:]``; ``activation`` is ``silu`` or ``gelu_tanh``.

    Arguments of the kernel: x ``float32[n, 2 * dim]``, out ``dtype[n, dim]``.
    """
    width = _width(dim)

    def gate_vector(row, vector, x, out):
        both = T.alloc_local((2 * width,), "float32")
        for part in range(2):
            put(both, x[row, run(part * dim + vector * width, width)], run(part * width, width))
        for i in range(width):
            value = activate(both[i], activation) * both[width + i]
            put_rounded(out, value, dtype, order, row, vector * width + i)

    @T.prim_func(private=True)
    def gate(x_h: T.handle, out_h: T.handle):
        T.func_attr(kernel_attributes(overlap))
        n = T.int64()
        x = T.match_buffer(x_h, (n, 2 * dim), "float32")
        out = T.match_buffer(out_h, (n, dim), dtype)
        T.device_entry()
        piece, row = T.cta_id([-(-dim // (width * THREADS)), T.cast(n, "int32")])
        thread = T.thread_id([THREADS])
        let_next_start(overlap)
        wait_for_rows(overlap)
        if piece * THREADS + thread < dim // width:
            gate_vector(row, piece * THREADS + thread, x, out)

    return gate


def round_rows(dim: int, dtype: str = "float16", overlap: bool = False, order: str = "") -> tirx.PrimFunc:
    """Build the kernel that rounds rows.

    Arguments of the kernel: x ``float32[n, dim]``, out ``dtype[n, dim]``.
    """
    width = _width(dim)

    def round_vector(row, vector, x, out):
        values = T.alloc_local((width,), "float32")
        put(values, x[row, run(vector * width, width)], run(0, width))
        for i in range(width):
            put_rounded(out, values[i], dtype, order, row, vector * width + i)

    @T.prim_func(private=True)
    def round_rows(x_h: T.handle, out_h: T.handle):
        T.func_attr(kernel_attributes(overlap))
        n = T.int64()
        x = T.match_buffer(x_h, (n, dim), "float32")
        out = T.match_buffer(out_h, (n, dim), dtype)
        T.device_entry()
        piece, row = T.cta_id([-(-dim // (width * THREADS)), T.cast(n, "int32")])
        thread = T.thread_id([THREADS])
        let_next_start(overlap)
        wait_for_rows(overlap)
        if piece * THREADS + thread < dim // width:
            round_vector(row, piece * THREADS + thread, x, out)

    return round_rows
