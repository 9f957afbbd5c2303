"""Keys of a page: the scores of queries, and scales in shared memory for those who have many.

A sealed page's channels come in the order in which they are stored. Keys are numbers in registers: what a
thread unpacks serves all of its queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from tvm.script import tirx as T

from kvq.layout import CODES_PER_CHUNK, KVLayout
from kvq.schedules.statements import put

from .attention_tile import LANES, THREADS
from .block import LOADS, held, local, shared
from .halves import halves_to_floats
from .key_header import KeyHeader
from .page_codes import code_number, whole_codes


class KeyScales:
    """Scales, minimums and order of a sealed page's key channels, in shared memory.

    They are prepared a page ahead, in two steps, so that the barriers of the softmax serve for them too.
    """

    def __init__(self, layout: KVLayout, thread) -> None:
        self.quantized = layout.k_bits is not None
        if not self.quantized:
            return
        self.header = KeyHeader(layout, thread, THREADS)
        self.scale, self.offset = (shared((layout.head_dim,), "float32") for _ in range(2))
        if self.header.mixed:
            self.channels = shared((layout.head_dim,), "int32")

    def gather(self, pool, unit) -> None:
        """First step: the header. A barrier must follow."""
        if self.quantized:
            self.header.gather(pool, unit)

    def prepare(self) -> None:
        """Second step: scales. Nobody may still read those of the page before; a barrier must follow."""

        def keep(stored, channel, scale, offset):
            put(self.scale, scale, stored)
            put(self.offset, offset, stored)
            if self.header.mixed:
                put(self.channels, channel, stored)

        if self.quantized:
            self.header.each_channel(keep)

    def channel(self, stored) -> tuple[Any, Callable[[Any], Any]]:
        """The channel that is stored there, and what makes a key of a number of its code."""
        scale, offset = T.bind(self.scale[stored]), T.bind(self.offset[stored])
        channel = T.bind(self.channels[stored]) if self.header.mixed else stored
        return channel, lambda number: held(number * scale + offset, "float32")


class Decoder(Protocol):
    """Knows the channel of a place among the codes, and what makes a key of the number of a code."""

    def channel(self, stored) -> tuple[Any, Callable[[Any], Any]]: ...


class Slice(Protocol):
    """A thread's part of a page: its lane of 16 for the tokens, and the channels of its team.

    Of things that are shared out, slice ``first`` has the first one.
    """

    @property
    def lane(self) -> Any: ...

    @property
    def slices(self) -> Any: ...

    def first(self, first: int) -> Any: ...

    def for_slice(self, count: Any, body: Callable[[Any], None], first: int = 0) -> None: ...


class _KeyClass(NamedTuple):
    """Channels of one width: the first, its word in the unit, chunks, and where these begin among all."""

    channel: int
    word: int
    bits: int
    chunks: int
    first_chunk: int


class KeyScores:
    """Scores of a thread's queries: ``scores[t, i]`` of token ``token(t)`` and query ``i`` of ``count``.

    ``query(channel)`` is a list of numbers, one a query; ``one_bits`` is :func:`.page_codes.one_bits`.
    """

    def __init__(self, layout: KVLayout, team: Slice, decoder: Decoder, count: int, query, one_bits) -> None:
        self.layout, self.team, self.decoder, self.count, self.query = layout, team, decoder, count, query
        self.tokens, self._one_bits = layout.page_size // LANES, one_bits
        self.scores = local((self.tokens, count), "float32")
        self.raw_halves = layout.row_dtype == "float16" and layout.k_bits is None
        widths = [bits for bits, _ in layout.k_classes] if layout.k_bits is not None else []
        self._words = {bits: local((bits,), "uint32") for bits in widths}

    def token(self, t: int):
        """The thread's ``t``-th token of a page. Rows in fp16 come two in a word."""
        if self.raw_halves:
            return self.team.lane * 2 + (t // 2 * 2 * LANES + t % 2)
        return self.team.lane + t * LANES

    def clear(self) -> None:
        """Start from nothing."""
        for t in range(self.tokens):
            for i in range(self.count):
                put(self.scores, T.float32(0), t, i)

    def _add(self, channel, keys: list) -> None:
        """Add the products of a channel."""
        for i, factor in enumerate(self.query(channel)):
            for t, key in enumerate(keys):
                put(self.scores, self.scores[t, i] + factor * key, t, i)

    def add_rows(self, row) -> None:
        """Add a row page's keys: ``row(i)`` is its ``i``-th number, float32."""
        page = self.layout.page_size

        def one(c) -> list:
            return [T.bind(row(c * page + self.token(t))) for t in range(self.tokens)]

        self._for_channels(one)

    def _for_channels(self, keys) -> None:
        """Add the slice's channels, ``keys(c)`` of each. Loads of some channels go together."""
        dim = self.layout.head_dim
        together = math.gcd(dim, max(1, LOADS // self.tokens))

        def some(step):
            channels = [held(step * together + i) for i in range(together)]
            found = [keys(c) for c in channels]
            for c, values in zip(channels, found, strict=True):
                self._add(c, values)

        self.team.for_slice(dim // together, some)

    def add_page(self, pool, unit) -> None:
        """Add a sealed page's keys, for which the decoder is prepared."""
        page, tokens = self.layout.page_size, self.tokens

        def halves(c) -> list:
            start = c * (page // 2) + self.team.lane
            words = [T.bind(pool[(*unit, start + u * LANES)]) for u in range(tokens // 2)]
            return [number for word in words for number in halves_to_floats(word)]

        def floats(c) -> list:
            words = [pool[(*unit, c * page + self.token(t))] for t in range(tokens)]
            return [T.bind(T.reinterpret("float32", word)) for word in words]

        if self.layout.k_bits is None:
            self._for_channels(halves if self.raw_halves else floats)
            return
        classes = self._classes()
        for place in classes:
            self._fetch(pool, unit, self.team.first(place.first_chunk), place)
        for place in classes:

            def chunk(number, place=place):
                self._chunk(pool, unit, number, place)

            self.team.for_slice(place.chunks, chunk, place.first_chunk)

    def _fetch(self, pool, unit, number, place: _KeyClass) -> None:
        """Load a chunk of a class, or the last one, to be added next."""
        start = held(T.min(number, place.chunks - 1) * (place.bits * LANES) + self.team.lane + place.word)
        for i in range(place.bits):
            put(self._words[place.bits], pool[(*unit, start + i * LANES)], i)

    def _classes(self) -> list[_KeyClass]:
        """The classes of key widths, in the order in which they are added.

        The chunks of the wide and the narrow class stand together in the row that slices take in turn: where
        both are fewer than the slices, some work on the one while others work on the other.
        """
        layout, places, channel, word, chunk = self.layout, [], 0, 0, 0
        for bits, channels in layout.k_classes:
            places.append(_KeyClass(channel, word, bits, channels * self.tokens // CODES_PER_CHUNK, 0))
            channel, word = channel + channels, word + channels * layout.page_size * bits // 32
        classes = []
        for place in places if len(places) == 1 else (places[0], places[2], places[1]):
            classes.append(place._replace(first_chunk=chunk))
            chunk += place.chunks
        return classes

    def _chunk(self, pool, unit, number, place: _KeyClass) -> None:
        """Add the channels whose codes are one chunk a lane: fetched before; the next one is, meanwhile."""
        tokens, bits = self.tokens, place.bits
        stored = held(number * (CODES_PER_CHUNK // tokens) + place.channel)
        whole = whole_codes(bits)
        words = [T.bind(self._words[bits][i]) for i in range(bits)]
        self._fetch(pool, unit, number + self.team.slices, place)
        if whole % tokens and tokens % whole:  # a channel's codes lie across words
            self._codes(words, stored, 0, CODES_PER_CHUNK // tokens, bits)
            return
        # words hold channels each for themselves: a loop, for the sake of the shader's size, in which they
        # move up in their registers
        in_word, together, left = max(1, whole // tokens), max(1, tokens // whole), local((bits,), "uint32")
        for i, word in enumerate(words):
            put(left, word, i)
        with T.serial(bits // together) as w:
            first = [T.bind(left[i]) for i in range(together)]
            self._codes(first, held(stored + w * in_word), 0, in_word, bits)
            for i in range(bits - together):
                put(left, left[i + together], i)
        if rest := CODES_PER_CHUNK - whole * bits:
            self._codes(words, held(stored + bits * in_word), whole * bits, rest // tokens, bits)

    def _codes(self, words: list, stored, first: int, channels: int, bits: int) -> None:
        """Add channels that stand from ``stored`` on, from code ``first`` of these words on."""
        for i in range(channels):
            channel, key = self.decoder.channel(held(stored + i))
            codes = range(first + i * self.tokens, first + (i + 1) * self.tokens)
            self._add(channel, [key(code_number(words, code, bits, self._one_bits)) for code in codes])
