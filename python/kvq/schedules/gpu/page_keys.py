"""Keys of a page: their scales in shared memory, and the scores of a tile's queries.

A sealed page's channels come in the order in which they are stored. Its scales wait in that order in shared
memory, with the channel of each pair; they are prepared a page ahead, in two steps, so that the barriers of
the softmax serve for them too. Keys are brought to float32 in registers: one multiply-add makes a key of a
code, and every query of the thread's block uses it.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.layout import BASE_BITS, CODES_PER_CHUNK, KVLayout
from kvq.quantization.kv_codec import EXPONENT_OFFSET
from kvq.schedules.statements import for_threads, put

from .attention_tile import LANES, THREADS, Team, Tile
from .block import held, shared
from .halves import half_of, half_to_float, halves_to_floats
from .page_codes import code_number, whole_codes

#: Header bits that a thread brings together.
_GATHERED = 8


def _count_bits(word):
    """Number of ones of a uint32, int32."""
    word = held(word - T.bitwise_and(T.shift_right(word, T.uint32(1)), T.uint32(0x55555555)), "uint32")
    pairs = T.bitwise_and(T.shift_right(word, T.uint32(2)), T.uint32(0x33333333))
    word = held(T.bitwise_and(word, T.uint32(0x33333333)) + pairs, "uint32")
    word = held(T.bitwise_and(word + T.shift_right(word, T.uint32(4)), T.uint32(0x0F0F0F0F)), "uint32")
    return T.cast(T.shift_right(word * T.uint32(0x01010101), T.uint32(24)), "int32")


class KeyScales:
    """Scales, minimums and order of a sealed page's key channels, in shared memory."""

    def __init__(self, layout: KVLayout, thread) -> None:
        self.layout, self.thread, self.half = layout, thread, layout.head_dim // 2
        self.quantized = layout.k_bits is not None
        self.mixed = len(layout.k_classes) > 1
        if self.quantized:
            # key = number * scale + offset, for the number of code_number
            self.scale, self.offset = (shared((layout.head_dim,), "float32") for _ in range(2))
            self.header = shared((layout.k_header_bits // _GATHERED,), "uint32")
        if self.mixed:
            self.pairs = shared((self.half,), "int32")

    def gather(self, pool, unit) -> None:
        """First step: the header, eight bits together. A barrier must follow."""
        if not self.quantized:
            return
        layout = self.layout

        def one(index):
            if not layout.header_in_v_scales:
                word = pool[(*unit, layout.k_header_offset + T.shift_right(index, 2))]
                shift = T.cast(T.bitwise_and(index, 3) * _GATHERED, "uint32")
                put(self.header, T.bitwise_and(T.shift_right(word, shift), T.uint32(0xFF)), index)
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
            put(self.header, found, index)

        for_threads(layout.k_header_bits // _GATHERED, self.thread, THREADS, one)

    def prepare(self, pool, unit) -> None:
        """Second step: scales. Nobody may still read those of the page before; a barrier must follow."""
        if not self.quantized:
            return
        layout = self.layout
        base = T.cast(self.header[(layout.k_header_bits - BASE_BITS) // _GATHERED], "int32")
        origin = held((base + EXPONENT_OFFSET) * 16)

        def channel(c, stored, bits):
            word = pool[(*unit, T.shift_right(c, 2) + layout.k_scale_offset)]
            shift = T.cast(T.bitwise_and(c, 3) * 8, "uint32")
            code = T.cast(T.bitwise_and(T.shift_right(word, shift), T.uint32(0xFF)), "int32")
            # a code's number is 1 + code / 2**bits, so the scale grows by as much
            scale = held(T.reinterpret("float32", T.shift_left(code + origin + bits * 16, 19)), "float32")
            halves = pool[(*unit, T.shift_right(c, 1) + layout.k_min_offset)]
            put(self.scale, scale, stored)
            put(self.offset, half_to_float(half_of(halves, c)) - scale, stored)

        def pair(p):
            place, bits = self._place(p)
            put(self.pairs, p, place)
            for part in range(2):
                channel(held(p + part * self.half), held(place * 2 + part), bits)

        if self.mixed:
            for_threads(self.half, self.thread, THREADS, pair)
        else:
            for_threads(layout.head_dim, self.thread, THREADS, lambda c: channel(c, c, layout.k_bits))

    def _bit(self, index):
        """Bit ``index`` of the header, int32."""
        word = self.header[T.shift_right(index, 3)]
        shifted = T.shift_right(word, T.cast(T.bitwise_and(index, 7), "uint32"))
        return T.cast(T.bitwise_and(shifted, T.uint32(1)), "int32")

    def _place(self, p):
        """Where pair ``p`` stands among the stored ones, and the width of its codes."""
        layout, half = self.layout, self.half
        wide, middle, _ = (channels // 2 for _, channels in layout.k_classes)
        before = T.int32(0), T.int32(0)
        for first in range(0, layout.head_dim, 32):
            word = T.uint32(0)
            for i in range(min(32, layout.head_dim - first) // _GATHERED):
                piece = self.header[first // _GATHERED + i]
                word = T.bitwise_or(word, T.shift_left(piece, T.uint32(_GATHERED * i)))
            word = held(word, "uint32")
            before = tuple(
                held(count + self._ones_below(word, end - first))
                for count, end in zip(before, (p, p + half), strict=True)
            )
        wider, narrower = before[0], held(before[1] - wide)
        is_wide, is_narrow = held(self._bit(p)), held(self._bit(p + half))
        place = T.Select(
            is_wide == 1,
            wider,
            T.Select(is_narrow == 1, narrower + (wide + middle), p - wider - narrower + wide),
        )
        return held(place), held(is_wide - is_narrow + layout.k_bits)

    @staticmethod
    def _ones_below(word, end):
        """Ones of the word's first ``end`` bits; ``end`` may be negative, or more than there are."""
        below = T.shift_left(T.uint32(1), T.cast(T.max(T.min(end, 31), 0), "uint32")) - T.uint32(1)
        below = T.Select(end >= 32, T.uint32(0xFFFFFFFF), below)
        return _count_bits(held(T.bitwise_and(word, below), "uint32"))


class KeyScores:
    """Scores of a team's queries: ``scores[t, i]`` of token ``token(t)`` and state ``i`` of its block."""

    def __init__(self, tile: Tile, team: Team, scales: KeyScales, scores) -> None:
        self.tile, self.team, self.layout, self.scales, self.scores = tile, team, tile.layout, scales, scores
        self.raw_halves, _ = tile.raw_halves

    def token(self, t: int):
        """The thread's ``t``-th token of a page. Rows in fp16 come two in a word."""
        if self.raw_halves:
            return self.team.lane * 2 + (t // 2 * 2 * LANES + t % 2)
        return self.team.lane + t * LANES

    def clear(self) -> None:
        """Start from nothing."""
        for t in range(self.tile.tokens):
            for i in range(self.tile.team_states):
                put(self.scores, T.float32(0), t, i)

    def _add(self, query, channel, keys: list) -> None:
        """Add the products of a channel: ``query(i, channel)`` is a number of state ``i`` of the block."""
        for i in range(self.tile.team_states):
            factor = T.bind(query(i, channel))
            for t, key in enumerate(keys):
                put(self.scores, self.scores[t, i] + factor * key, t, i)

    def add_rows(self, query, row) -> None:
        """Add a row page's keys: ``row(i)`` is its ``i``-th number, float32."""
        page = self.layout.page_size

        def channel(c):
            self._add(query, c, [T.bind(row(c * page + self.token(t))) for t in range(self.tile.tokens)])

        self.team.for_slice(self.layout.head_dim, channel)

    def add_page(self, query, pool, unit) -> None:
        """Add a sealed page's keys, whose scales are prepared."""
        page, tokens = self.layout.page_size, self.tile.tokens

        def halves(c):
            keys = []
            for u in range(tokens // 2):
                start = c * (page // 2) + self.team.lane
                keys += halves_to_floats(T.bind(pool[(*unit, start + u * LANES)]))
            self._add(query, c, keys)

        def floats(c):
            words = [pool[(*unit, c * page + self.token(t))] for t in range(tokens)]
            self._add(query, c, [T.bind(T.reinterpret("float32", word)) for word in words])

        if not self.scales.quantized:
            self.team.for_slice(self.layout.head_dim, halves if self.raw_halves else floats)
            return
        for first_channel, first_word, bits, chunks, first_chunk in self._classes():

            def chunk(number, first_channel=first_channel, first_word=first_word, bits=bits):
                self._chunk(query, pool, unit, number, first_channel, first_word, bits)

            self.team.for_slice(chunks, chunk, first_chunk)

    def _classes(self) -> list[tuple[int, int, int, int, int]]:
        """Of each class of key widths: first channel, first word, width, chunks, and where these begin.

        The chunks of the wide and the narrow class stand together in the row that slices take in turn: where
        both are fewer than the slices, some work on the one while others work on the other.
        """
        layout, places, channel, word, chunk = self.layout, [], 0, 0, 0
        for bits, channels in layout.k_classes:
            places.append((channel, word, bits, channels * self.tile.tokens // CODES_PER_CHUNK))
            channel, word = channel + channels, word + channels * layout.page_size * bits // 32
        classes = []
        for place in places if len(places) == 1 else (places[0], places[2], places[1]):
            classes.append((*place, chunk))
            chunk += place[-1]
        return classes

    def _chunk(self, query, pool, unit, number, first_channel: int, first_word: int, bits: int) -> None:
        """Add the channels whose codes are one chunk a lane."""
        tokens = self.tile.tokens
        stored = held(number * (CODES_PER_CHUNK // tokens) + first_channel)
        start = held(number * (bits * LANES) + self.team.lane + first_word)
        whole = whole_codes(bits)

        def words_from(at, count: int):
            return [T.bind(pool[(*unit, at + i * LANES)]) for i in range(count)]

        if whole % tokens and tokens % whole:  # a channel's codes lie across words
            self._codes(query, words_from(start, bits), stored, 0, CODES_PER_CHUNK // tokens, bits)
            return
        # words hold channels each for themselves: a loop, for the sake of the shader's size
        in_word, together = max(1, whole // tokens), max(1, tokens // whole)
        with T.serial(bits // together) as w:
            words = words_from(held(start + w * (together * LANES)), together)
            self._codes(query, words, held(stored + w * in_word), 0, in_word, bits)
        if rest := CODES_PER_CHUNK - whole * bits:
            words = words_from(start, bits)
            self._codes(query, words, held(stored + bits * in_word), whole * bits, rest // tokens, bits)

    def _codes(self, query, words: list, stored, first: int, channels: int, bits: int) -> None:
        """Add channels that stand from ``stored`` on, from code ``first`` of these words on."""
        tokens, scales = self.tile.tokens, self.scales
        for i in range(channels):
            at = held(stored + i)
            channel = at
            if scales.mixed:
                second = T.bitwise_and(at, 1) * scales.half
                channel = held(scales.pairs[T.shift_right(at, 1)] + second)
            scale, offset = T.bind(scales.scale[at]), T.bind(scales.offset[at])
            numbers = [code_number(words, first + i * tokens + t, bits) for t in range(tokens)]
            self._add(query, channel, [held(x * scale + offset, "float32") for x in numbers])
