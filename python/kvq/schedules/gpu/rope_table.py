"""rope_table: cosines and sines of a step's positions, once for all layers.

The languages promise little of their sines, least of all for large angles, and Metal's compiler takes sums
apart. So an angle is reduced here, by three pieces of pi/2 whose multiples are exact, with a barrier between
them that no compiler looks through; what is left within an eighth of a turn takes two polynomials.
"""

from __future__ import annotations

from math import factorial, pi

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.schedules.statements import put, when

from .block import ATTRIBUTES, launch, shared, sync
from .limits import GpuLimits

_THREADS = 128
#: Pieces of pi/2: five bits each, so that their products with numbers below 2**19 are exact, and the rest.
_PIECES = (25 / 16, 17 / 2048, pi / 2 - 25 / 16 - 17 / 2048)


def _series(square, first: int, terms: int):
    """``sum((-1)**k * square**k / (2 k + first)!)``: the sine's over its argument, or the cosine's."""
    total = T.float32(0)
    for k in reversed(range(terms)):
        total = total * square + T.float32((-1) ** k / factorial(2 * k + first))
    return T.bind(total)


def rope_table(half: int, attention_factor: float, limits: GpuLimits) -> tirx.PrimFunc:
    """Build the kernel; ``half`` is the number of frequencies, half the rotary dimensions.

    Arguments of the kernel: positions ``int32[n]``, inverse_frequency ``float32[half]``, out
    ``float32[n, 2 * half]``: cosines, then sines, times the attention factor of the RoPE scaling. Angles are
    exact to float32's last bits below 800,000, that is for as many positions.
    """
    threads = min(_THREADS, limits.threads)

    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        n = IRBuilder.name("n", T.int64())
        positions = builder.arg("positions", T.Buffer((n,), "int32"))
        frequency = builder.arg("frequency", T.Buffer((half,), "float32"))
        out = builder.arg("out", T.Buffer((n, 2 * half), "float32"))
        with launch([-(-half // threads), T.cast(n, "int32")], threads) as (piece, row, thread):
            rest = shared((threads,), "float32")
            j = T.bind(T.min(piece * threads + thread, half - 1))
            angle = T.bind(T.cast(positions[row], "float32") * frequency[j])
            quarters = T.bind(T.floor(angle * T.float32(2 / pi) + T.float32(0.5)))
            put(rest, angle, thread)
            for part in _PIECES:
                sync()
                put(rest, rest[thread] - quarters * T.float32(part), thread)
            sync()
            left = T.bind(rest[thread])
            square = T.bind(left * left)
            sine, cosine = T.bind(_series(square, 1, 5) * left), _series(square, 0, 6)
            quarter = T.bind(T.bitwise_and(T.cast(quarters, "int32"), 3))
            odd = T.bind(T.bitwise_and(quarter, 1) == 1)

            def signed(value, negative):
                factor = T.Select(negative, T.float32(-attention_factor), T.float32(attention_factor))
                return value * factor

            def store():
                of_cosine, of_sine = T.Select(odd, sine, cosine), T.Select(odd, cosine, sine)
                put(out, signed(of_cosine, T.Or(quarter == 1, quarter == 2)), row, j)
                put(out, signed(of_sine, quarter >= 2), row, j + half)

            when(piece * threads + thread < half, store)
    return script.get()
