"""Values of a page: what they add to the sums of a tile's queries.

Codes are brought to numbers around zero, in registers; scales and powers of two are in the weights. A thread
has the same channels and states on every page, and of every page a slice of its tokens: its sums stay in
registers until the last page.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.layout import CODES_PER_CHUNK
from kvq.schedules.statements import put

from .attention_tile import LANES, Team, Tile
from .block import held, local
from .halves import halves_to_floats
from .page_codes import lowest_number, whole_codes


class ValueSums:
    """Sums ``sums[i, k]`` of state ``i`` of the team's block and the thread's ``k``-th channel.

    ``weights`` is shared, ``page_size`` floats of each state.
    """

    def __init__(self, tile: Tile, team: Team, weights) -> None:
        self.tile, self.team, self.layout, self.weights = tile, team, tile.layout, weights
        _, self.raw_halves = tile.raw_halves
        self.sums = local((tile.team_states, tile.channels), "float32")
        self.words = local((tile.channels,), "uint32")
        self.first_state = held(team.block * tile.team_states)

    def channel(self, k: int):
        """The thread's ``k``-th channel, which may be beyond the last. Rows in fp16 come two in a word."""
        if self.raw_halves:
            return self.team.lane * 2 + (k // 2 * 2 * LANES + k % 2)
        return self.team.lane + k * LANES

    def _read(self, k: int):
        """The same to read: the last channel instead of those beyond."""
        dim = self.layout.head_dim
        beyond = (k // 2 * 2 + 2 if self.raw_halves else k + 1) * LANES > dim
        return T.min(self.channel(k), dim - 1) if beyond else self.channel(k)

    def each(self, body) -> None:
        """Emit ``body(i, k)`` for every sum."""
        for i in range(self.tile.team_states):
            for k in range(self.tile.channels):
                body(i, k)

    def fade(self, factors) -> None:
        """Multiply the sums by ``factors[state]``."""
        for i in range(self.tile.team_states):
            factor = T.bind(factors[self.first_state + i])
            for k in range(self.tile.channels):
                put(self.sums, self.sums[i, k] * factor, i, k)

    def _add(self, token, values: list) -> None:
        """Add a token's values of the thread's channels, weighted."""
        for i in range(self.tile.team_states):
            place = (self.first_state + i) * self.layout.page_size + token
            weight = T.bind(self.weights[place])
            for k, value in enumerate(values):
                put(self.sums, self.sums[i, k] + weight * value, i, k)

    def add_rows(self, row, end) -> None:
        """Add the first ``end`` tokens of a row page; ``row(i)`` is its ``i``-th number, float32."""

        def one(token):
            start = T.bind(token * self.layout.head_dim)
            self._add(token, [T.bind(row(start + self._read(k))) for k in range(self.tile.channels)])

        self.team.for_slice(end, one)

    def add_page(self, pool, unit) -> None:
        """Add a sealed page."""
        page, bits = self.layout.page_size, self.layout.v_bits

        def rows(token):
            self._raw(pool, unit, token)

        if bits is None:
            self.team.for_slice(page, rows)
        else:
            self.team.for_slice(page * bits // CODES_PER_CHUNK, lambda row: self._codes(pool, unit, row))

    def _raw(self, pool, unit, token) -> None:
        """A token of an unquantized page."""
        dim, channels, offset = self.layout.head_dim, self.tile.channels, self.layout.v_offset
        values = []
        for k in range(0, channels, 2 if self.raw_halves else 1):
            if self.raw_halves:
                at = token * (dim // 2) + T.shift_right(self._read(k), 1)
                values += halves_to_floats(T.bind(pool[(*unit, at + offset)]))
            else:
                word = pool[(*unit, token * dim + self._read(k) + offset)]
                values.append(T.bind(T.reinterpret("float32", word)))
        self._add(token, values)

    def _codes(self, pool, unit, row) -> None:
        """A row of words: codes ``c`` as ``(c - 2**(bits - 1)) / 2**bits``. Every word stands for itself."""
        layout, bits, channels = self.layout, self.layout.v_bits or 0, range(self.tile.channels)
        start = T.bind(row * layout.head_dim + layout.v_offset)
        for k in channels:
            put(self.words, pool[(*unit, start + self._read(k))], k)
        place = held(T.truncmod(row, bits))
        first, whole = held(T.truncdiv(row, bits) * CODES_PER_CHUNK), whole_codes(bits)
        token = held(place * whole + first)
        with T.serial(whole) as i:
            values = [T.bind(lowest_number(self.words[k], bits) - T.float32(1.5)) for k in channels]
            self._add(T.bind(token + i), values)
            for k in channels:
                put(self.words, T.shift_right(self.words[k], T.uint32(bits)), k)
        # of a code that lies across the words each adds its bit, and the first takes the middle code off;
        # what is left of a word are those bits
        if rest := CODES_PER_CHUNK - whole * bits:
            factor = T.bind(T.reinterpret("float32", T.shift_left(place + (127 - bits), 23)))
            middle = T.bind(T.Select(place == 0, T.float32(0.5), T.float32(0)))
            for i in range(rest):
                found = [T.shift_right(self.words[k], T.uint32(i)) for k in channels]
                ones = [T.cast(T.bitwise_and(bit, T.uint32(1)), "float32") for bit in found]
                self._add(T.bind(first + (whole * bits + i)), [T.bind(x * factor - middle) for x in ones])
