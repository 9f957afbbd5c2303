"""Sealed pages in the order of tensor-core fragments, for kernels that go through them value by value.

:mod:`kvq.quantization.fragments` says what the order is. ``WordPlace`` tells which codes lie in a word,
``CodePlace`` in which word a code lies.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.layout import FRAGMENT_TILE, KVLayout
from kvq.quantization.fragments import PAIRS, vector_words

from .block import WARP


class WordPlace:
    """Which codes lie in the word at ``index`` of a page's keys or values.

    Parameters
    ----------
    layout : KVLayout
    bits : int
        Bits of a code; 16 for fp16 rows.
    is_value : bool
    index : expression
        int32, from the start of the codes.
    """

    def __init__(self, layout: KVLayout, bits: int, is_value: bool, index) -> None:
        self.layout, self.bits, self.is_value = layout, bits, is_value
        vector = vector_words(layout.page_size, layout.head_dim, bits)
        self.lane = T.bind(T.truncmod(T.truncdiv(index, vector), WARP))
        at = T.bind(T.truncdiv(index, WARP * vector) * vector + T.truncmod(index, vector))
        self.chunk = T.bind(T.truncdiv(at, bits))
        self.word = T.bind(T.truncmod(at, bits))

    def codes(self):
        """Yield ``(token, channel, source bit or None, shift)`` of every code in the word, as expressions."""
        fields = PAIRS // self.bits
        for h in range(2):
            for i in range(fields):
                yield (*self._place(self.word * fields + i, h), None, self.bits * i + 16 * h)
            for i in range(fields * self.bits, PAIRS):
                yield (*self._place(i, h), self.word, i + 16 * h)

    def _place(self, i, h: int):
        """Token and channel of pair ``i`` of the chunk, half ``h``."""
        page, dim = self.layout.page_size, self.layout.head_dim
        tiles = dim // FRAGMENT_TILE
        pair = self.chunk * PAIRS + i
        y, x = T.bitwise_and(pair, 1), T.bitwise_and(T.shift_right(pair, 1), 1)
        tile = T.bind(T.shift_right(pair, 2))
        row, column = T.truncdiv(tile, tiles), T.truncmod(tile, tiles)
        g, c = T.shift_right(self.lane, 2), T.bitwise_and(self.lane, 3)
        if self.is_value:
            return (c * 2 + h) * (page // 8) + row * 2 + x, g * (dim // 8) + column * 2 + y
        return g * (page // 8) + row * 2 + x, c * (dim // 4) + column * 4 + y * 2 + h


class CodePlace:
    """Where the code of ``(token, channel)`` lies in a page's keys or values."""

    def __init__(self, layout: KVLayout, bits: int, is_value: bool, token, channel) -> None:
        page, dim = layout.page_size, layout.head_dim
        self.layout, self.bits = layout, bits
        part, rest = T.truncdiv(token, page // 8), T.truncmod(token, page // 8)
        row, x = T.shift_right(rest, 1), T.bitwise_and(rest, 1)
        if is_value:
            c, self.h = T.shift_right(part, 1), T.bitwise_and(part, 1)
            g, rest = T.truncdiv(channel, dim // 8), T.truncmod(channel, dim // 8)
            column = T.shift_right(rest, 1)
            y = T.bitwise_and(rest, 1)
        else:
            g = part
            c, rest = T.truncdiv(channel, dim // 4), T.truncmod(channel, dim // 4)
            column = T.shift_right(rest, 2)
            y, self.h = T.bitwise_and(T.shift_right(rest, 1), 1), T.bitwise_and(rest, 1)
        self.lane = T.bind(g * 4 + c)
        pair = T.bind(((row * (dim // FRAGMENT_TILE) + column) * 2 + x) * 2 + y)
        self.chunk, self.i = T.bind(T.shift_right(pair, 4)), T.bind(T.bitwise_and(pair, PAIRS - 1))

    def _index(self, word):
        """Index from the start of the codes of word ``word`` of the chunk."""
        vector = vector_words(self.layout.page_size, self.layout.head_dim, self.bits)
        at = self.chunk * self.bits + word
        return (T.truncdiv(at, vector) * WARP + self.lane) * vector + T.truncmod(at, vector)

    def read(self, word):
        """The code, uint32, from ``word(index)``."""
        fields = PAIRS // self.bits
        half = self.h * 16
        at = T.truncdiv(self.i, fields)
        if fields * self.bits < PAIRS:
            at = T.min(at, self.bits - 1)
        shift = T.cast((self.i - at * fields) * self.bits + half, "uint32")
        code = T.bitwise_and(T.shift_right(word(self._index(at)), shift), T.uint32(2**self.bits - 1))
        if fields * self.bits == PAIRS:
            return code
        across = T.uint32(0)
        top = T.cast(half + (PAIRS - 1), "uint32")
        for w in range(self.bits):
            bit = T.bitwise_and(T.shift_right(word(self._index(w)), top), T.uint32(1))
            across = T.bitwise_or(across, T.shift_left(bit, T.uint32(w)))
        return T.if_then_else(self.i == PAIRS - 1, across, code)
