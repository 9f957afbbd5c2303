"""Vector vocabulary of the CPU kernels.

Every operation that rounds is spelled out as one LLVM intrinsic or one plain operation, so that a
row's result cannot depend on what the compiler chose to contract in one loop and not in another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import log

from tvm.script import tirx as T
from tvm.target import codegen

from kvq.schedules.statements import put, run

LOG2E = 1.4426950408889634
#: Score of a masked key: far below any real one, and finite, so that no NaN can come of it.
MASKED = -1e30
#: Binary exponent below which ``exp`` gives 0.
SMALLEST_EXPONENT = -100.0
#: Rows below which a kernel over rows is not worth a thread-pool launch.
SERIAL_ROWS = 4

_EXP2 = tuple(log(2) ** k / f for k, f in enumerate((1, 1, 2, 6, 24, 120, 720)))


@dataclass(frozen=True)
class CpuIsa:
    """The instructions a kernel may use.

    Attributes
    ----------
    lanes : int
        float32 lanes of a vector register: 16 with AVX-512, otherwise 8 (4-lane machines split them).
    dot : str
        How int4 codes meet int8 activations: ``vnni512``, ``maddubs`` (AVX2) or ``generic``.
    """

    lanes: int = 8
    dot: str = "generic"


@cache
def _intrinsic(name: str) -> int:
    return codegen.llvm_lookup_intrinsic_id(name)


def intrinsic(name, dtype, *args):
    """Call an LLVM intrinsic by its full name."""
    return T.call_llvm_pure_intrin(T.uint32(_intrinsic(name)), *args, dtype=dtype)


def splat(value, lanes):
    """A vector with ``value`` in every lane."""
    return T.broadcast(value, lanes)


def constant(value, lanes):
    """A float32 vector constant."""
    return T.broadcast(T.float32(value), lanes)


def fma(a, b, c, lanes):
    """``a * b + c`` of float32 vectors, rounded once where the machine has FMA."""
    return intrinsic("llvm.fmuladd", f"float32x{lanes}", a, b, c)


def fma1(a, b, c):
    """``a * b + c`` of float32 scalars."""
    return intrinsic("llvm.fmuladd", "float32", a, b, c)


def rint(x, lanes):
    """Round to the nearest integer, ties to even, as numpy's ``rint``."""
    return intrinsic("llvm.nearbyint", f"float32x{lanes}", x)


def exp(x, lanes):
    """``e**x`` for x <= 0: relative error 2e-7, exactly 1 at 0, and 0 below 2**-100.

    Smaller results would be denormal after the next product, which costs a hundred cycles each.
    """
    scaled = x * constant(LOG2E, lanes)
    t = T.max(scaled, constant(SMALLEST_EXPONENT, lanes))
    whole = rint(t, lanes)
    part = t - whole
    power = constant(_EXP2[-1], lanes)
    for c in _EXP2[-2::-1]:
        power = fma(power, part, constant(c, lanes), lanes)
    exponent = T.shift_left(T.cast(whole, f"int32x{lanes}"), splat(T.int32(23), lanes))
    result = T.reinterpret(f"float32x{lanes}", T.reinterpret(f"int32x{lanes}", power) + exponent)
    return T.Select(scaled < constant(SMALLEST_EXPONENT, lanes), constant(0, lanes), result)


def tanh(x, lanes):
    """The hyperbolic tangent, with an error of 2e-7 of 1: by magnitude, so that ``exp`` cannot overflow."""
    magnitude = T.bind(intrinsic("llvm.fabs", f"float32x{lanes}", x))
    fading = T.bind(exp(magnitude * constant(-2, lanes), lanes))
    ratio = (constant(1, lanes) - fading) / (constant(1, lanes) + fading)
    return intrinsic("llvm.copysign", f"float32x{lanes}", ratio, x)


def half_to_float(words, lanes):
    """``lanes`` fp16 numbers in ``lanes / 2`` uint32 words, as float32."""
    return T.cast(T.reinterpret(f"float16x{lanes}", words), f"float32x{lanes}")


def prefetch(buffer, start, words):
    """Ask for ``words`` 32-bit words of ``buffer[start]`` ahead of their use: pages lie scattered."""
    with T.unroll(-(-words // 16)) as line:
        address = T.address_of(buffer[(*start, line * 16)])
        name = T.uint32(_intrinsic("llvm.prefetch"))
        T.evaluate(T.call_llvm_intrin(name, address, T.int32(0), T.int32(3), T.int32(1), dtype="void"))


def code_to_float(codes, lanes):
    """Unsigned integer codes as float32 (through int32: there is no unsigned conversion in AVX2)."""
    return T.cast(T.reinterpret(f"int32x{lanes}", codes), f"float32x{lanes}")


def extract_code(word, index, bits, lanes):
    """Code ``index`` of a chunk of 32, as uint32 lanes.

    Parameters
    ----------
    word : callable
        ``word(i)`` gives the uint32 vector of word ``i`` of the chunk.
    """
    per_word = 32 // bits
    if index >= per_word * bits:  # a code that lies across the top bits of all words
        code = None
        for i in range(bits):
            bit = T.bitwise_and(
                T.shift_right(word(i), splat(T.uint32(index), lanes)), splat(T.uint32(1), lanes)
            )
            bit = T.shift_left(bit, splat(T.uint32(i), lanes)) if i else bit
            code = bit if code is None else T.bitwise_or(code, bit)
        return code
    at, shift = divmod(index, per_word)
    shifted = T.shift_right(word(at), splat(T.uint32(shift * bits), lanes)) if shift else word(at)
    if (shift + 1) * bits == 32:
        return shifted
    return T.bitwise_and(shifted, splat(T.uint32(2**bits - 1), lanes))


def place_code(index, bits):
    """Where code ``index`` of a chunk goes: ``(word, source bit or None, shift)`` triples."""
    per_word = 32 // bits
    if index >= per_word * bits:
        return [(w, w, index) for w in range(bits)]
    return [(index // per_word, None, bits * (index % per_word))]


def for_rows(n, body, *args):
    """Emit ``body(i, *args)`` for every row: in parallel, or serially where a launch would cost more."""

    def block(i):
        with T.sblock("row"):
            row = T.axis.spatial(n, i)
            T.reads()
            T.writes()
            body(row, *args)

    with T.If(n < T.int64(SERIAL_ROWS)):
        with T.Then(), T.serial(n) as i:
            block(i)
        with T.Else(), T.parallel(n) as i:
            block(i)


def reduce_lanes(combine, vector, scratch, lanes):
    """Combine the lanes of a float32 vector to a scalar, by halves, through ``scratch[lanes]``."""
    put(scratch, vector, run(0, lanes))
    half = lanes // 2
    while half > 1:
        put(scratch, combine(scratch[run(0, half)], scratch[run(half, half)]), run(0, half))
        half //= 2
    return T.bind(combine(scratch[0], scratch[1]))


def row_page_to_float(out, rows, start, values, lanes):
    """Copy ``values`` numbers of a row page ``rows[start]`` into the float32 buffer ``out``."""
    with T.serial(values // lanes) as j:
        put(out, T.cast(rows[(*start, run(j * lanes, lanes))], f"float32x{lanes}"), run(j * lanes, lanes))


def for_blocks(count, body, *args):
    """Emit ``body(i, *args)`` for ``i`` below ``count``, in parallel."""
    with T.parallel(count) as i, T.sblock("block"):
        block = T.axis.spatial(count, i)
        T.reads()
        T.writes()
        body(block, *args)
