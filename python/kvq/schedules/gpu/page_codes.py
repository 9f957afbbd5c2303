"""Codes of the order ``lanes`` to numbers, in registers.

A code is moved to the top of the mantissa of 1.0: three operations, none of them a conversion, give
``1 + code / 2**bits``, and whoever scales it takes the 1 out again.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.layout import CODES_PER_CHUNK

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


def _number(mantissa):
    return T.reinterpret("float32", T.bitwise_or(mantissa, T.uint32(_ONE)))


def code_number(words: list, index: int, bits: int):
    """``1 + code / 2**bits`` of code ``index`` of a chunk of 32, whose ``bits`` words are given; float32."""
    per_word = whole_codes(bits)
    first = _MANTISSA - bits  # of the mantissa's bits that the code takes
    if index < per_word * bits:
        at, place = divmod(index, per_word)
        moved = _move(words[at], first - place * bits)
        return _number(T.bitwise_and(moved, T.uint32((2**bits - 1) << first)))
    found = T.uint32(0)
    for bit in range(bits):
        moved = _move(words[bit], first + bit - index)
        found = T.bitwise_or(found, T.bitwise_and(moved, T.uint32(1 << (first + bit))))
    return _number(found)


def lowest_number(word, bits: int):
    """The same of the code in a word's lowest bits."""
    return code_number([word], 0, bits)
