"""Codes of the order ``lanes`` to numbers, in registers.

A code is put into the mantissa of 1.0, where it stands if it may stand there, and a multiply-add takes the 1
out and gives the code its weight: two operations, none of them a conversion, and both exact. GPUs do shifts
and conversions at half of the rate of multiply-adds, or less.

The bits of 1.0 come as a variable (:func:`one_bits`): an instruction of NVIDIA's GPUs has room for one
constant, and of a mask and an "or" with constants their compiler of SPIR-V makes two.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.layout import CODES_PER_CHUNK

from .block import held

_MANTISSA = 23
_ONE = 0x3F800000


def whole_codes(bits: int) -> int:
    """Codes that lie whole in a word; those that are left of a chunk lie across the top bits of its words."""
    return CODES_PER_CHUNK // bits


def _move(word, places: int):
    """Shift to the left, to the right where ``places`` is negative."""
    if places == 0:
        return word
    return (T.shift_left if places > 0 else T.shift_right)(word, T.uint32(abs(places)))


def one_bits(count):
    """The bits of 1.0 in a register; ``count`` is an int32 that is not negative, as no compiler can know."""
    return held(T.bitwise_or(T.cast(T.shift_right(count, 31), "uint32"), T.uint32(_ONE)), "uint32")


def _number(mantissa, place: int, middle: int, exponent):
    """What stands in a mantissa from bit ``place`` on, less ``middle``."""
    one = 2 ** (_MANTISSA - place)
    number = T.reinterpret("float32", T.bitwise_or(mantissa, exponent))
    return number * T.float32(one) - T.float32(one + middle)


def code_number(words: list, index: int, bits: int, exponent, middle: int = 0):
    """Code ``index`` of a chunk of 32, whose ``bits`` words are given, less ``middle``; float32, exact.

    Of a code that lies whole in its word, the words behind that one need not be given. ``exponent`` is
    :func:`one_bits`.
    """
    per_word = whole_codes(bits)
    if index < per_word * bits:
        at, place = divmod(index, per_word)
        word, place = words[at], place * bits
        if place + bits > _MANTISSA:  # all that reach so far move by as much: one shift serves for them
            word, place = _move(word, -16), place - 16
        return _number(T.bitwise_and(word, T.uint32((2**bits - 1) << place)), place, middle, exponent)
    found = T.uint32(0)
    for bit in range(bits):
        moved = _move(words[bit], bit - index)
        found = T.bitwise_or(found, T.bitwise_and(moved, T.uint32(1 << bit)))
    return _number(found, 0, middle, exponent)
