"""fp16 numbers in the halves of words, by integers.

The languages disagree about denormal numbers, which scales may be, not all of them round conversions to the
nearest, and one common compiler of WGSL takes a word for two numbers wrongly.
"""

from __future__ import annotations

from tvm.script import tirx as T

from .block import held

_SIGN = 0x8000


def _scaled(x, factor: float):
    """``x * factor**3``: TVM prints seven digits of a constant, too few for ``2**24`` and its inverse."""
    for _ in range(3):
        x = x * T.float32(factor)
    return x


def half_of(word, index):
    """Half ``index`` (0 the lower) of a word, uint32."""
    if isinstance(index, int):
        moved = T.shift_right(word, T.uint32(16)) if index else T.bitwise_and(word, T.uint32(0xFFFF))
        return held(moved, "uint32")
    shift = T.cast(T.bitwise_and(index, 1) * 16, "uint32")
    return held(T.bitwise_and(T.shift_right(word, shift), T.uint32(0xFFFF)), "uint32")


def half_to_float(bits):
    """A finite fp16 number by its bits (uint32), as float32."""
    magnitude = held(T.bitwise_and(bits, T.uint32(_SIGN - 1)), "uint32")
    normal = T.reinterpret("float32", T.shift_left(magnitude, T.uint32(13)) + T.uint32(112 << 23))
    denormal = _scaled(T.cast(magnitude, "float32"), 2.0**-8)
    value = held(T.Select(magnitude < T.uint32(0x400), denormal, normal), "float32")
    sign = T.shift_left(T.bitwise_and(bits, T.uint32(_SIGN)), T.uint32(16))
    return held(T.reinterpret("float32", T.bitwise_or(T.reinterpret("uint32", value), sign)), "float32")


def halves_to_floats(word):
    """Both halves of a word, as float32."""
    return [half_to_float(half_of(word, i)) for i in range(2)]


def float_to_half(x):
    """The bits (uint32) of the fp16 number nearest to a float32 below 65520, ties to even."""
    bits = held(T.reinterpret("uint32", x), "uint32")
    magnitude = held(T.bitwise_and(bits, T.uint32(0x7FFFFFFF)), "uint32")
    odd = T.bitwise_and(T.shift_right(magnitude, T.uint32(13)), T.uint32(1))
    normal = T.shift_right(magnitude + odd + T.uint32(0xFFF) - T.uint32(112 << 23), T.uint32(13))
    denormal = T.cast(round_even(_scaled(T.reinterpret("float32", magnitude), 2.0**8)), "uint32")
    half = T.Select(magnitude < T.uint32(113 << 23), denormal, normal)
    sign = T.bitwise_and(T.shift_right(bits, T.uint32(16)), T.uint32(_SIGN))
    return held(T.bitwise_or(sign, half), "uint32")


def round_even(x):
    """The int32 nearest to a float32 of less than 2**23, ties to even.

    By its bits: a compiler may contract the product that ``x`` is into a difference from its floor.
    """
    bits = held(T.reinterpret("int32", x))
    magnitude = held(T.bitwise_and(bits, T.int32(0x7FFFFFFF)))
    mantissa = held(T.bitwise_or(T.bitwise_and(magnitude, T.int32(0x7FFFFF)), T.int32(0x800000)))
    places = held(T.max(T.min(150 - T.shift_right(magnitude, 23), 30), 1))  # behind the point
    whole = held(T.shift_right(mantissa, places))
    rest = held(mantissa - T.shift_left(whole, places))
    middle = held(T.shift_left(T.int32(1), places - 1))
    tie = T.And(rest == middle, T.bitwise_and(whole, 1) == 1)
    rounded = held(whole + T.Select(T.Or(rest > middle, tie), 1, 0))
    return held(T.Select(bits < 0, 0 - rounded, rounded))
