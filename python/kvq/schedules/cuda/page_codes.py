"""Which codes lie in a word of a sealed page, for kernels that write pages word by word.

:mod:`kvq.quantization.fragments` says what the order is.
"""

from __future__ import annotations

from math import gcd

from tvm.script import tirx as T

from kvq.layout import FRAGMENT_TILE
from kvq.schedules.statements import for_threads

from .block import WARP
from .fragments import CHUNK_PAIRS, Codes


class _Word:
    """Word ``word`` of the ``bits`` of a chunk, ``chunk`` of those of a lane's tiles in a block of tokens."""

    def __init__(
        self, page: int, dim: int, bits: int, lane, chunk, word, first_row, first_step: int, steps: int
    ):
        self.page, self.dim, self.bits, self.word, self.chunk = page, dim, bits, word, chunk
        self.first_row, self.first_step, self.steps = first_row, first_step, steps
        self.g, self.c = T.bind(T.shift_right(lane, 2)), T.bind(T.bitwise_and(lane, 3))

    def codes(self, place):
        """Yield ``(token, channel, source bit or None, shift)`` of every code in the word, as expressions."""
        fields = CHUNK_PAIRS // self.bits
        for h in range(2):
            for i in range(fields):
                yield (*place(self, self.word * fields + i, h), None, self.bits * i + 16 * h)
            for i in range(fields * self.bits, CHUNK_PAIRS):
                yield (*place(self, T.int32(i), h), self.word, i + 16 * h)

    def tile(self, i):
        """Of pair ``i`` of the chunk: row and step of its tile, and x and y."""
        pair = self.chunk * CHUNK_PAIRS + i
        tile = T.bind(T.shift_right(pair, 2))
        row = T.bind(self.first_row + T.truncdiv(tile, self.steps))
        step = self.first_step + T.truncmod(tile, self.steps)
        return row, step, T.bitwise_and(T.shift_right(pair, 1), 1), T.bitwise_and(pair, 1)


def key_code(word: _Word, i, h: int):
    """Token and stored channel of half ``h`` of pair ``i``: of codes of keys."""
    row, step, x, y = word.tile(i)
    return word.g * (word.page // 8) + row * 2 + x, step * 16 + y * 8 + word.c * 2 + h


def key_row(word: _Word, i, h: int):
    """Token and channel: of keys as rows."""
    row, step, x, y = word.tile(i)
    return word.g * (word.page // 8) + row * 2 + x, word.c * (word.dim // 4) + step * 4 + y * 2 + h


def value(word: _Word, i, h: int):
    """Token and channel: of values, codes or rows."""
    row, step, x, y = word.tile(i)
    return (word.c * 2 + h) * (word.page // 8) + row * 2 + x, word.g * (word.dim // 8) + step * 2 + y


def for_words(codes: Codes, dim: int, place, thread, threads: int, read, write) -> None:
    """Emit, for every word of a page's codes, ``write(index, word)`` with the codes that ``read`` gives.

    Parameters
    ----------
    place
        :func:`key_code`, :func:`key_row` or :func:`value`.
    read : callable
        ``read(token, channel)`` is a uint32 of as many bits as the channel's class has.
    """
    block = codes.block if len(codes.classes) > 1 else codes.page
    vector, all_words = codes.vector, codes.lane_words(block)
    counts = [block * channels * bits // (32 * WARP) for bits, channels in codes.classes]
    together = gcd(vector, *counts)
    first_word = first_step = 0
    for (bits, channels), count in zip(codes.classes, counts, strict=True):
        steps = channels // FRAGMENT_TILE

        def one(i, bits=bits, count=count, first_word=first_word, first_step=first_step, steps=steps):
            lane = T.bind(T.truncmod(T.truncdiv(i, together), WARP))
            of_lane = T.bind(T.truncdiv(i, WARP * together) * together + T.truncmod(i, together))
            number, within = T.bind(T.truncdiv(of_lane, count)), T.bind(T.truncmod(of_lane, count))
            at = T.bind(number * all_words + first_word + within)
            word = _Word(
                codes.page,
                dim,
                bits,
                lane,
                T.bind(T.truncdiv(within, bits)),
                T.bind(T.truncmod(within, bits)),
                number * (block // FRAGMENT_TILE),
                first_step,
                steps,
            )
            packed = T.alloc_local((1,), "uint32")
            T.buffer_store(packed, T.uint32(0), [0])
            for token, channel, source_bit, shift in word.codes(place):
                code = T.bind(read(token, channel))
                if source_bit is not None:
                    code = T.bitwise_and(T.shift_right(code, T.cast(source_bit, "uint32")), T.uint32(1))
                T.buffer_store(packed, T.bitwise_or(packed[0], T.shift_left(code, T.uint32(shift))), [0])
            write((T.truncdiv(at, vector) * WARP + lane) * vector + T.truncmod(at, vector), packed[0])

        for_threads(codes.page // block * count * WARP, thread, threads, one)
        first_word += count
        first_step += steps
