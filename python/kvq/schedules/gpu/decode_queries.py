"""Queries of a decode step in shared memory, multiplied by the scales of a page's keys.

``sum(q * (code * scale + offset))`` is ``sum(q * scale * code) + sum(q * offset)``. What codes are multiplied
by is made once a page, in the order in which channels are stored; the second sum is one number for the page.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.schedules.statements import for_threads, put

from .block import load_run, local
from .decode_reduce import CrewReduction
from .decode_tile import CREW, Crew, DecodeTile
from .key_header import KeyHeader


class PageQueries:
    """The queries of a crew for its page.

    ``number(head, channel)`` is a number of the query ``head`` of the crew's block, as the step has it;
    ``memory`` is the workgroup's arena.
    """

    def __init__(self, tile: DecodeTile, crew: Crew, number, reduction: CrewReduction, memory) -> None:
        self.tile, self.layout, self.crew, self.number = tile, tile.layout, crew, number
        self.reduction, self.quantized = reduction, tile.own_queries
        self.values = memory
        if self.quantized:
            self.header = KeyHeader(tile.layout, crew.member, CREW, tile.crews, crew.index)
            self._sums = local((tile.heads,), "float32")

    def _place(self, stored):
        return self.tile.queries_start(self.crew) + stored * self.tile.heads

    def at(self, stored) -> list:
        """The crew's numbers of the channel that is stored there."""
        return load_run(self.values, self._place(stored), self.tile.heads)

    def channel(self, stored):
        """As :class:`.page_keys.Decoder` has it: the scales are in the queries."""
        return stored, lambda number: T.bind(number)

    def plain(self) -> None:
        """The queries as they are, for pages of rows. Nobody may still read those before."""

        def one(channel):
            for i in range(self.tile.heads):
                put(self.values, self.number(i, channel), self._place(channel) + i)

        for_threads(self.layout.head_dim, self.crew.member, CREW, one)

    def scaled(self) -> None:
        """The queries for a sealed page, whose header is there; and what :meth:`offsets` needs."""
        heads = range(self.tile.heads)
        for i in heads:
            put(self._sums, T.float32(0), i)

        def one(stored, channel, scale, offset):
            for i in heads:
                number = T.bind(self.number(i, channel))
                put(self.values, number * scale, self._place(stored) + i)
                put(self._sums, self._sums[i] + number * offset, i)

        self.header.each_channel(one)
        self.reduction.offer([self._sums[i] for i in heads])

    def no_offsets(self) -> None:
        """For a page of rows :meth:`offsets` gives zero."""
        self.reduction.offer([T.float32(0)] * self.tile.heads)
