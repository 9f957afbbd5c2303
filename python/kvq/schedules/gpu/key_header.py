"""What a sealed page says of its key channels: their widths, hence their places, and their scales.

The header's bits lie among the V scales. Threads that share a page bring them together in shared memory, then
each finds the places of some pairs of channels.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.layout import BASE_BITS, KVLayout
from kvq.quantization.kv_codec import EXPONENT_OFFSET
from kvq.schedules.statements import for_threads, put, when

from .block import held, local, shared
from .halves import half_of, half_to_float

#: Header bits that a thread brings together.
_GATHERED = 8


class KeyHeader:
    """The header of a page for ``threads`` threads; ``copy`` of ``copies`` such groups in a workgroup."""

    def __init__(self, layout: KVLayout, thread, threads: int, copies: int = 1, copy=0) -> None:
        self.layout, self.thread, self.threads, self.half = layout, thread, threads, layout.head_dim // 2
        self.mixed = len(layout.k_classes) > 1
        count = layout.k_header_bits // _GATHERED
        self._bytes, self._first = shared((copies * count,), "uint32"), copy * count
        # a pair of channels at a time, or where all have one width a channel
        self._each = self.half if self.mixed else layout.head_dim
        self._turns, self._parts = -(-self._each // threads), 2 if self.mixed else 1
        self._scales, self._minimums = (local((self._turns * self._parts,), "uint32") for _ in range(2))

    def _byte(self, index):
        return self._bytes[self._first + index]

    def gather(self, pool, unit) -> None:
        """Read it, eight bits a thread, and the thread's scales and minimums. A barrier must follow."""
        layout = self.layout

        def one(index):
            if not layout.header_in_v_scales:
                word = pool[(*unit, layout.k_header_offset + T.shift_right(index, 2))]
                shift = T.cast(T.bitwise_and(index, 3) * _GATHERED, "uint32")
                found = T.bitwise_and(T.shift_right(word, shift), T.uint32(0xFF))
                put(self._bytes, found, self._first + index)
                return
            token = held(T.truncmod(index * _GATHERED, layout.page_size))
            place = held(T.cast(T.truncdiv(index * _GATHERED, layout.page_size), "uint32"), "uint32")
            start = held(T.shift_right(token, 1) + layout.v_scale_offset)
            found = T.uint32(0)
            for i in range(_GATHERED // 2):
                word = held(T.shift_right(pool[(*unit, start + i)], place), "uint32")
                found = T.bitwise_or(found, T.shift_left(T.bitwise_and(word, T.uint32(1)), T.uint32(2 * i)))
                upper = T.bitwise_and(T.shift_right(word, T.uint32(16)), T.uint32(1))
                found = held(T.bitwise_or(found, T.shift_left(upper, T.uint32(2 * i + 1))), "uint32")
            put(self._bytes, found, self._first + index)

        for_threads(layout.k_header_bits // _GATHERED, self.thread, self.threads, one)
        for turn in range(self._turns):
            for part in range(self._parts):
                channel = self._channel(turn, part)
                scales = pool[(*unit, T.shift_right(channel, 2) + layout.k_scale_offset)]
                put(self._scales, scales, turn * self._parts + part)
                minimums = pool[(*unit, T.shift_right(channel, 1) + layout.k_min_offset)]
                put(self._minimums, minimums, turn * self._parts + part)

    def _channel(self, turn: int, part: int):
        """A channel of the thread; in a turn beyond the last one, that."""
        first = self.thread + turn * self.threads
        if (turn + 1) * self.threads > self._each:
            first = T.min(first, self._each - 1)
        return held(first + part * self.half)

    def each_channel(self, body) -> None:
        """Emit ``body(stored, channel, scale, offset)`` for the thread's channels, once the header is there.

        ``stored`` is the channel's place among the codes; its keys are ``code * scale + offset``.
        """
        layout = self.layout
        base = T.cast(self._byte((layout.k_header_bits - BASE_BITS) // _GATHERED), "int32")
        origin = held((base + EXPONENT_OFFSET) * 16)

        def pair(turn):
            place = self._place(self._channel(turn, 0)) if self.mixed else None
            for part in range(self._parts):
                c, at = self._channel(turn, part), turn * self._parts + part
                shift = T.cast(T.bitwise_and(c, 3) * 8, "uint32")
                code = T.cast(T.bitwise_and(T.shift_right(self._scales[at], shift), T.uint32(0xFF)), "int32")
                scale = held(T.reinterpret("float32", T.shift_left(code + origin, 19)), "float32")
                minimum = half_to_float(half_of(T.bind(self._minimums[at]), c))
                body(c if place is None else held(place * 2 + part), c, scale, minimum)

        for turn in range(self._turns):
            if (turn + 1) * self.threads <= self._each:
                pair(turn)
            else:
                when(self.thread + turn * self.threads < self._each, lambda turn=turn: pair(turn))

    def _bit(self, index):
        """Bit ``index`` of the header, int32."""
        shifted = T.shift_right(
            self._byte(T.shift_right(index, 3)), T.cast(T.bitwise_and(index, 7), "uint32")
        )
        return T.cast(T.bitwise_and(shifted, T.uint32(1)), "int32")

    def _place(self, p):
        """Where pair ``p`` stands among the stored ones."""
        layout, half = self.layout, self.half
        wide, middle, _ = (channels // 2 for _, channels in layout.k_classes)
        before = T.int32(0), T.int32(0)
        for first in range(0, layout.head_dim, 32):
            word = T.uint32(0)
            for i in range(min(32, layout.head_dim - first) // _GATHERED):
                piece = self._byte(first // _GATHERED + i)
                word = T.bitwise_or(word, T.shift_left(piece, T.uint32(_GATHERED * i)))
            word = held(word, "uint32")
            before = tuple(
                held(count + _ones_below(word, end - first))
                for count, end in zip(before, (p, p + half), strict=True)
            )
        wider, narrower = before[0], held(before[1] - wide)
        place = T.Select(
            self._bit(p) == 1,
            wider,
            T.Select(self._bit(p + half) == 1, narrower + (wide + middle), p - wider - narrower + wide),
        )
        return held(place)


def _ones_below(word, end):
    """Ones of the word's first ``end`` bits; ``end`` may be negative, or more than there are."""
    below = T.shift_left(T.uint32(1), T.cast(T.max(T.min(end, 31), 0), "uint32")) - T.uint32(1)
    below = T.Select(end >= 32, T.uint32(0xFFFFFFFF), below)
    return _count_bits(held(T.bitwise_and(word, below), "uint32"))


def _count_bits(word):
    """Number of ones of a uint32, int32."""
    word = held(word - T.bitwise_and(T.shift_right(word, T.uint32(1)), T.uint32(0x55555555)), "uint32")
    pairs = T.bitwise_and(T.shift_right(word, T.uint32(2)), T.uint32(0x33333333))
    word = held(T.bitwise_and(word, T.uint32(0x33333333)) + pairs, "uint32")
    word = held(T.bitwise_and(word + T.shift_right(word, T.uint32(4)), T.uint32(0x0F0F0F0F)), "uint32")
    return T.cast(T.shift_right(word * T.uint32(0x01010101), T.uint32(24)), "int32")
