"""Reductions over the threads of a crew, in three steps with barriers of the workgroup between them."""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.schedules.statements import put, when

from .block import held, load_run, shared
from .decode_tile import CREW, PARTS, Crew, DecodeTile


class CrewReduction:
    """Reduces a number a thread for each query head of a block.

    :meth:`offer`, a barrier, :meth:`combine`, a barrier, :meth:`result`. Behind the second barrier numbers
    may be offered again; they may be combined once every thread has the result.
    """

    def __init__(self, tile: DecodeTile, crew: Crew) -> None:
        self.heads, self.crew = tile.heads, crew
        self._offered = shared((tile.crews * CREW * tile.heads,), "float32")
        self._parts = shared((tile.crews * PARTS * tile.heads,), "float32")

    def offer(self, values: list) -> None:
        """Each thread's numbers."""
        place = (self.crew.index * CREW + self.crew.member) * self.heads
        for i, value in enumerate(values):
            put(self._offered, value, place + i)

    def combine(self, operator) -> None:
        """Some threads combine those of several."""
        each = CREW // PARTS

        def one():
            part, head = T.truncdiv(self.crew.member, self.heads), T.truncmod(self.crew.member, self.heads)
            first = held((self.crew.index * CREW + part * each) * self.heads + head)
            value = self._offered[first]
            for i in range(1, each):
                value = operator(value, self._offered[first + i * self.heads])
            put(self._parts, value, self.crew.index * (PARTS * self.heads) + self.crew.member)

        when(self.crew.member < PARTS * self.heads, one)

    def result(self, operator) -> list:
        """The reduced numbers, for every thread of the crew."""
        values: list = []
        for part in range(PARTS):
            found = load_run(self._parts, (self.crew.index * PARTS + part) * self.heads, self.heads)
            values = [T.bind(operator(a, b)) for a, b in zip(values, found, strict=True)] if values else found
        return values

    def sum_at(self, place):
        """The sum of number ``place`` of all crews' numbers, counted crew by crew; for any thread."""
        crew, head = T.truncdiv(place, self.heads), T.truncmod(place, self.heads)
        first = held(crew * (PARTS * self.heads) + head)
        total = self._parts[first]
        for part in range(1, PARTS):
            total = T.bind(total + self._parts[first + part * self.heads])
        return total
