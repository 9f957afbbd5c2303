"""fp16 numbers in the halves of words, by integers.

The languages disagree about denormal numbers, which scales may be, not all of them round conversions to the
nearest, and one common compiler of WGSL takes a word for two numbers wrongly.
"""

from __future__ import annotations

from tvm.script import tirx as T

_SIGN = 0x8000


def half_of(word, index):
    """Half ``index`` (0 the lower) of a word, uint32."""
    if isinstance(index, int):
        moved = T.shift_right(word, T.uint32(16)) if index else T.bitwise_and(word, T.uint32(0xFFFF))
        return T.bind(moved)
    shift = T.cast(T.bitwise_and(index, 1) * 16, "uint32")
    return T.bind(T.bitwise_and(T.shift_right(word, shift), T.uint32(0xFFFF)))


def half_to_float(bits):
    """A finite fp16 number by its bits (uint32), as float32."""
    magnitude = T.bind(T.bitwise_and(bits, T.uint32(_SIGN - 1)))
    normal = T.reinterpret("float32", T.shift_left(magnitude, T.uint32(13)) + T.uint32(112 << 23))
    denormal = T.cast(magnitude, "float32") * T.float32(2.0**-24)
    value = T.bind(T.Select(magnitude < T.uint32(0x400), denormal, normal))
    sign = T.shift_left(T.bitwise_and(bits, T.uint32(_SIGN)), T.uint32(16))
    return T.bind(T.reinterpret("float32", T.bitwise_or(T.reinterpret("uint32", value), sign)))


def halves_to_floats(word):
    """Both halves of a word, as float32."""
    return [half_to_float(half_of(word, i)) for i in range(2)]
