"""Pieces of a kernel that work on one row of one head: RoPE, Hadamard, cleaning.

These are emitters: plain functions that write statements into the kernel being built.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.schedules.statements import put, run

from .vector import constant, fma, splat

FP16_MAX = 65504.0
FP32_MAX = 3.4028234663852886e38


def vector_lanes(extent: int, lanes: int) -> int:
    """The widest power-of-two vector, at most ``lanes``, that divides ``extent``."""
    return min(extent & -extent, lanes)


def hadamard_inplace(x, t, dim: int) -> None:
    """Multiply the float32 row ``x[dim]`` by the orthonormal Hadamard matrix; ``t[dim]`` is scratch.

    Strides of at least 8 are butterflies of whole vectors; the last three run inside the 8 lanes, as
    eight multiplications of a broadcast element by a vector of signs.
    """
    block = dim & -dim
    stride = 8
    while stride < block:
        with T.serial(dim // (2 * stride)) as group, T.unroll(stride // 8) as j:
            low = group * (2 * stride) + j * 8
            a = T.bind(x[run(low, 8)])
            b = T.bind(x[run(low + stride, 8)])
            put(x, a + b, run(low, 8))
            put(x, a - b, run(low + stride, 8))
        stride *= 2

    def signs(j):
        value = T.bitwise_and(T.ramp(T.int32(0), 1, 8), splat(T.int32(j), 8))
        for shift in (2, 1):
            value = T.bitwise_xor(value, T.shift_right(value, splat(T.int32(shift), 8)))
        odd = T.bitwise_and(value, splat(T.int32(1), 8))
        return T.cast(splat(T.int32(1), 8) - odd - odd, "float32x8")

    with T.serial(dim // 8) as group:
        total = constant(0, 8)
        for j in range(8):
            total = T.bind(fma(splat(x[group * 8 + j], 8), signs(j), total, 8))
        put(t, total * constant(float(block) ** -0.5, 8), run(group * 8, 8))
    copy_row(x, t, dim)


def copy_row(x, source, dim: int) -> None:
    """Copy a row of ``dim`` float32 numbers; ``source`` is a buffer."""
    with T.serial(dim // 8) as j:
        put(x, source[run(j * 8, 8)], run(j * 8, 8))


def load_row(x, qkv, i, head, dim: int, isa_lanes: int, start: int = 0) -> None:
    """Read ``qkv[i, head, start:]`` into ``x[start:dim]`` as float32."""
    lanes = vector_lanes(dim - start, isa_lanes)
    with T.serial((dim - start) // lanes) as j:
        at = run(start + j * lanes, lanes)
        put(x, T.cast(qkv[i, head, at], f"float32x{lanes}"), at)


def load_rotated(x, qkv, rope, i, head, dim: int, rotary_dim: int, isa_lanes: int) -> None:
    """Read ``qkv[i, head]`` into ``x[dim]`` as float32, with RoPE on its first ``rotary_dim`` numbers.

    The two halves of the rotary part form the pairs (GPT-NeoX order); ``rope[row]`` holds the cosines,
    then the sines, of the row's position.
    """
    half = rotary_dim // 2
    if half:
        lanes = vector_lanes(half, isa_lanes)
        with T.serial(half // lanes) as j:
            first, second = run(j * lanes, lanes), run(half + j * lanes, lanes)
            cos, sin = T.bind(rope[i, first]), T.bind(rope[i, second])
            a = T.bind(T.cast(qkv[i, head, first], f"float32x{lanes}"))
            b = T.bind(T.cast(qkv[i, head, second], f"float32x{lanes}"))
            put(x, fma(a, cos, constant(0, lanes) - b * sin, lanes), first)
            put(x, fma(b, cos, a * sin, lanes), second)
    if rotary_dim < dim:
        load_row(x, qkv, i, head, dim, isa_lanes, start=rotary_dim)


def clean_row(x, out, count, dim: int, row_dtype: str, lanes: int) -> None:
    """Make a row storable in ``out[dim]``: NaN to 0, magnitudes saturated, counted in ``count[2, lanes]``."""
    limit = FP16_MAX if row_dtype == "float16" else FP32_MAX
    one, none = splat(T.int32(1), lanes), splat(T.int32(0), lanes)
    with T.serial(dim // lanes) as j:
        at, lane = run(j * lanes, lanes), run(0, lanes)
        raw = T.bind(x[at])
        # by its bits: a comparison with itself would be simplified away
        magnitude = T.bitwise_and(T.reinterpret(f"int32x{lanes}", raw), splat(T.int32(0x7FFFFFFF), lanes))
        is_nan = magnitude > splat(T.int32(0x7F800000), lanes)
        number = T.bind(T.Select(is_nan, constant(0, lanes), raw))
        kept = T.bind(T.max(T.min(number, constant(limit, lanes)), constant(-limit, lanes)))
        put(count, count[0, lane] + T.Select(is_nan, one, none), 0, lane)
        put(count, count[1, lane] + T.Select(kept != number, one, none), 1, lane)
        put(out, T.cast(kept, f"{row_dtype}x{lanes}"), at)
