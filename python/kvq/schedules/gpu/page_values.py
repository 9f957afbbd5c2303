"""Values of a page: what they add to the sums of queries.

Codes are brought to numbers around zero, in registers; scales are in the weights. A thread
has the same channels and states on every page, and of every page a slice of its tokens: its sums stay in
registers until the last page.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.layout import CODES_PER_CHUNK, KVLayout
from kvq.schedules.statements import put

from .block import LOADS, held, local
from .halves import halves_to_floats
from .page_codes import code_number, whole_codes


class ValueSums:
    """Sums ``sums[i, k]`` of query ``i`` of ``count`` and the thread's ``k``-th channel.

    Parameters
    ----------
    layout : KVLayout
    lane, lanes
        The thread is one of ``lanes`` that share out the channels.
    count : int
        Queries of the thread.
    weights : callable
        ``weights(token)``: a list of numbers, one a query.
    one_bits
        :func:`.page_codes.one_bits`.
    first, stride
        Of the tokens, or rows of words, the thread has every ``stride``-th from ``first`` on.
    """

    def __init__(
        self, layout: KVLayout, lane, lanes: int, count: int, weights, one_bits, first=0, stride=1
    ) -> None:
        self.layout, self.lane, self.lanes, self.count = layout, lane, lanes, count
        self.weights, self.first, self.stride, self._one_bits = weights, first, stride, one_bits
        self.raw_halves = layout.row_dtype == "float16" and layout.v_bits is None
        step = 2 if self.raw_halves else 1
        self.channels = -(-layout.head_dim // (lanes * step)) * step
        self.sums = local((count, self.channels), "float32")
        # rows of words that are fetched ahead: a row takes longer to come than to be added
        self._ahead = 2 if isinstance(stride, int) and stride == 1 and self._rows % 2 == 0 else 1
        self.words = local((self.channels,), "uint32")
        self.following = local((self._ahead, self.channels), "uint32")

    def _each(self, count, body) -> None:
        """Emit ``body(i)`` for the thread's share of ``count``."""
        if isinstance(self.stride, int) and self.stride == 1:
            with T.serial(count) as i:
                body(i)
            return
        steps = held(T.truncdiv(count - self.first + (self.stride - 1), self.stride))
        with T.serial(steps) as step:
            body(held(step * self.stride + self.first))

    def channel(self, k: int):
        """The thread's ``k``-th channel, which may be beyond the last. Rows in fp16 come two in a word."""
        if self.raw_halves:
            return self.lane * 2 + (k // 2 * 2 * self.lanes + k % 2)
        return self.lane + k * self.lanes

    def _read(self, k: int):
        """The same to read: the last channel instead of those beyond."""
        dim = self.layout.head_dim
        beyond = (k // 2 * 2 + 2 if self.raw_halves else k + 1) * self.lanes > dim
        return T.min(self.channel(k), dim - 1) if beyond else self.channel(k)

    def each(self, body) -> None:
        """Emit ``body(i, k)`` for every sum."""
        for i in range(self.count):
            for k in range(self.channels):
                body(i, k)

    def clear(self) -> None:
        """Start from nothing."""
        self.each(lambda i, k: put(self.sums, T.float32(0), i, k))

    def fade(self, factors: list) -> None:
        """Multiply the sums of each query by its factor."""
        self.each(lambda i, k: put(self.sums, self.sums[i, k] * factors[i], i, k))

    def _add(self, token, values: list) -> None:
        """Add a token's values of the thread's channels, weighted."""
        for i, weight in enumerate(self.weights(token)):
            for k, value in enumerate(values):
                put(self.sums, self.sums[i, k] + weight * value, i, k)

    def add_rows(self, row, end) -> None:
        """Add the first ``end`` tokens of a row page; ``row(i)`` is its ``i``-th number, float32."""

        last = held(end - 1)

        def one(token) -> list:
            start = T.bind(T.min(token, last) * self.layout.head_dim)
            return [T.bind(row(start + self._read(k))) for k in range(self.channels)]

        self._for_tokens(end, one)

    def _for_tokens(self, count, values) -> None:
        """Add the thread's share of ``count`` tokens, and some beyond, which weigh nothing.

        ``values(token)`` loads a token's values, also of one beyond. Loads of some tokens go together.
        """
        together = 1 << max(1, LOADS // self.channels).bit_length() - 1

        def some(step):
            tokens = [held(step * together + i) for i in range(together)]
            found = [values(token) for token in tokens]
            for token, those in zip(tokens, found, strict=True):
                self._add(token, those)

        self._each(T.truncdiv(count + (together - 1), together), some)

    def fetch(self, pool, unit) -> None:
        """Load the first codes of a sealed page, to be added next."""
        if self.layout.v_bits is not None:
            for i in range(self._ahead):
                self._fetch(pool, unit, self.first + i, i)

    def add_page(self, pool, unit) -> None:
        """Add a sealed page, of which the first codes are there."""
        page, bits = self.layout.page_size, self.layout.v_bits
        if bits is None:
            self._for_tokens(page, lambda token: self._raw(pool, unit, token))
            return

        def rows(step):
            for i in range(self._ahead):
                self._codes(pool, unit, held(step * self._ahead + i), i)

        self._each(self._rows // self._ahead, rows)

    @property
    def _rows(self) -> int:
        """Rows of words of a page."""
        return self.layout.page_size * (self.layout.v_bits or 0) // CODES_PER_CHUNK

    def _fetch(self, pool, unit, row, place: int) -> None:
        """Load a row of words, or the last one, to be added later."""
        start = T.bind(T.min(row, self._rows - 1) * self.layout.head_dim + self.layout.v_offset)
        for k in range(self.channels):
            put(self.following, pool[(*unit, start + self._read(k))], place, k)

    def _raw(self, pool, unit, token) -> list:
        """The values of a token of an unquantized page."""
        dim, channels, offset = self.layout.head_dim, self.channels, self.layout.v_offset
        values = []
        for k in range(0, channels, 2 if self.raw_halves else 1):
            if self.raw_halves:
                at = token * (dim // 2) + T.shift_right(self._read(k), 1)
                values += halves_to_floats(T.bind(pool[(*unit, at + offset)]))
            else:
                word = pool[(*unit, token * dim + self._read(k) + offset)]
                values.append(T.bind(T.reinterpret("float32", word)))
        return values

    def _codes(self, pool, unit, row, fetched: int) -> None:
        """A row of words: codes ``c`` as ``c - 2**(bits - 1)``. Every word stands for itself.

        The row was fetched before; a later one is, meanwhile.
        """
        bits, channels = self.layout.v_bits or 0, range(self.channels)
        middle = 2 ** (bits - 1)
        for k in channels:
            put(self.words, self.following[fetched, k], k)
        self._fetch(pool, unit, row + self.stride * self._ahead, fetched)
        place = held(T.truncmod(row, bits))
        first, whole = held(T.truncdiv(row, bits) * CODES_PER_CHUNK), whole_codes(bits)
        token = held(place * whole + first)
        with T.serial(2) as half:  # of a word's whole codes
            words = [T.bind(self.words[k]) for k in channels]
            here = held(half * (whole // 2) + token)
            for i in range(whole // 2):
                self._add(
                    here + i, [T.bind(code_number([word], i, bits, self._one_bits, middle)) for word in words]
                )
            for k in channels:
                put(self.words, T.shift_right(words[k], T.uint32(whole // 2 * bits)), k)
        # of a code that lies across the words each adds its bit, and the first takes the middle code off;
        # what is left of a word are those bits
        if rest := CODES_PER_CHUNK - whole * bits:
            factor = T.bind(T.reinterpret("float32", T.shift_left(place + 127, 23)))
            offset = T.bind(T.Select(place == 0, T.float32(middle), T.float32(0)))
            for i in range(rest):
                found = [T.shift_right(self.words[k], T.uint32(i)) for k in channels]
                ones = [T.cast(T.bitwise_and(bit, T.uint32(1)), "float32") for bit in found]
                self._add(T.bind(first + (whole * bits + i)), [T.bind(x * factor - offset) for x in ones])
