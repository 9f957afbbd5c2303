"""What a sealed page says of its key channels: their widths, hence their places, and their scales.

The header's bits lie among the V scales. Threads that share a page bring them together in shared memory, then
each finds the places of some pairs of channels.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.layout import BASE_BITS, KVLayout
from kvq.quantization.kv_codec import EXPONENT_OFFSET
from kvq.schedules.statements import for_threads, put, when

from .block import held, load_run, local, shared
from .halves import half_of, half_to_float

#: Header bits that a thread brings together, those of a word, and pieces of a word.
_GATHERED, _WORD = 8, 32
_PIECES = _WORD // _GATHERED


def header_words(layout: KVLayout) -> int:
    """Words of shared memory that a group's header takes."""
    return -(-layout.k_header_bits // _WORD) * _PIECES


class KeyHeader:
    """The header of a page for ``threads`` threads; ``copy`` of ``copies`` such groups in a workgroup.

    A thread has some pairs of channels, or where all have one width some channels: neighbours, if they can be
    dealt out evenly, which stand in the same words.
    """

    def __init__(self, layout: KVLayout, thread, threads: int, copies: int = 1, copy=0) -> None:
        self.layout, self.thread, self.threads, self.half = layout, thread, threads, layout.head_dim // 2
        self.mixed = len(layout.k_classes) > 1
        count = header_words(layout)
        self._bytes, self._first = shared((copies * count,), "uint32"), copy * count
        self._each = self.half if self.mixed else layout.head_dim
        self._turns, self._parts = -(-self._each // threads), 2 if self.mixed else 1
        self._together = self._turns if self._turns * threads == self._each and self._turns in (2, 4) else 1
        words = self._turns // self._together * self._parts
        self._scales = local((words,), "uint32")
        self._minimums = local((words * max(1, self._together // 2),), "uint32")

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
        for turn in range(0, self._turns, self._together):
            for part in range(self._parts):
                channel, at = self._channel(turn, part), self._at(turn, part)
                scales = pool[(*unit, T.shift_right(channel, 2) + layout.k_scale_offset)]
                put(self._scales, scales, at)
                for pair in range(0, self._together, 2):
                    first = T.shift_right(channel, 1) + (layout.k_min_offset + pair // 2)
                    put(self._minimums, pool[(*unit, first)], self._minimum_at(turn + pair, part))

    def _at(self, turn: int, part: int) -> int:
        """Which word of scales."""
        return turn // self._together * self._parts + part

    def _minimum_at(self, turn: int, part: int) -> int:
        """Which word of minimums."""
        return self._at(turn, part) * max(1, self._together // 2) + turn % self._together // 2

    def _channel(self, turn: int, part: int):
        """A channel of the thread; in a turn beyond the last one, that."""
        if self._together > 1:
            return held(self.thread * self._turns + (turn + part * self.half))
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

        def pair(turn: int, place):
            for part in range(self._parts):
                c = self._channel(turn, part)
                shift = T.cast(T.bitwise_and(c, 3) * 8, "uint32")
                scales = T.shift_right(self._scales[self._at(turn, part)], shift)
                code = T.cast(T.bitwise_and(scales, T.uint32(0xFF)), "int32")
                scale = held(T.reinterpret("float32", T.shift_left(code + origin, 19)), "float32")
                minimum = half_to_float(half_of(T.bind(self._minimums[self._minimum_at(turn, part)]), c))
                body(c if place is None else held(place * 2 + part), c, scale, minimum)

        def pairs(turn: int):
            places = self._places(self._channel(turn, 0)) if self.mixed else [None] * self._together
            for i, place in enumerate(places):
                pair(turn + i, place)

        for turn in range(0, self._turns, self._together):
            if (turn + self._together) * self.threads <= self._each:
                pairs(turn)
            else:
                when(self.thread + turn * self.threads < self._each, lambda turn=turn: pairs(turn))

    def _bits(self, index):
        """Bits ``index ..`` of the header, uint32: those of the thread's neighbours at least."""
        return held(
            T.shift_right(self._byte(T.shift_right(index, 3)), T.cast(T.bitwise_and(index, 7), "uint32")),
            "uint32",
        )

    def _word(self, first: int):
        """Bits ``first ..`` of the header, as many as are channels, 32 at most."""
        word = T.uint32(0)
        pieces = load_run(self._bytes, self._first + first // _GATHERED, _PIECES)
        for i, piece in enumerate(pieces[: (self.layout.head_dim - first) // _GATHERED]):
            word = T.bitwise_or(word, T.shift_left(piece, T.uint32(_GATHERED * i)) if i else piece)
        return held(word, "uint32")

    def _places(self, first) -> list:
        """Where pair ``first`` and the thread's neighbours of it stand among the stored ones.

        As many pairs are wide as the layout says, so ones of the second half are counted from its start.
        """
        dim, half = self.layout.head_dim, self.half
        wide, middle, _ = (channels // 2 for _, channels in self.layout.k_classes)
        wider, narrower = T.int32(0), T.int32(0)
        for start in range(0, dim, _WORD):
            word = self._word(start)
            if start < half:
                wider = held(wider + _ones_below(word, first - start))
            if start + _WORD > half:
                ones = _ones_below(word, first + (half - start))
                if start < half:  # the word has the last ones of the first half, too
                    ones = ones - _ones_below(word, T.int32(half - start))
                narrower = held(narrower + ones)
        lower, upper, places = self._bits(first), self._bits(first + half), []
        for i in range(self._together):
            low, high = (
                held(T.cast(T.bitwise_and(T.shift_right(bits, T.uint32(i)), T.uint32(1)), "int32"))
                for bits in (lower, upper)
            )
            others = T.Select(high == 1, narrower + (wide + middle), first + i - wider - narrower + wide)
            places.append(held(T.Select(low == 1, wider, others)))
            wider, narrower = held(wider + low), held(narrower + high)
        return places


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
