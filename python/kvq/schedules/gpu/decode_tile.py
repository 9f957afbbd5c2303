"""How the threads of a workgroup share a decode step's attention: one row, a group of heads, some pages.

A *crew* of 32 threads has a page at a time, and up to four of the query heads, a *block*. Its two teams of 16
have half of the channels each for the scores; for the sums of values every thread has every 32nd channel. So
crews meet at barriers only, a page is unpacked once for all heads of a block, and no sum crosses crews before
the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from kvq.layout import K_LANES, KVLayout

from .block import held
from .key_header import header_words
from .limits import GpuLimits

#: Threads of a team: what the order of the key codes is made for. Two are a crew.
LANES = K_LANES
CREW = 2 * LANES
#: Parts in which a crew's numbers are reduced.
PARTS = 4
_MOST_CREWS = 4
#: Most scores that a thread holds, and most query heads of a block.
_SCORES, _HEADS = 16, 4


@dataclass(frozen=True)
class DecodeTile:
    """What is the same for every row.

    Attributes
    ----------
    layout : KVLayout
    group : int
        Query heads of a KV head.
    heads : int
        Query heads of a block: 1, 2 or 4, so that a block's numbers are one load.
    crews : int
        Of a workgroup.
    """

    layout: KVLayout
    group: int
    heads: int
    crews: int

    @property
    def blocks(self) -> int:
        """Blocks of query heads."""
        return -(-self.group // self.heads)

    @property
    def pages(self) -> int:
        """Pages at a time."""
        return self.crews // self.blocks

    @property
    def threads(self) -> int:
        return self.crews * CREW

    @property
    def own_queries(self) -> bool:
        """Whether each crew has queries of its own, multiplied by the scales of its page's keys."""
        return self.layout.k_bits is not None

    @property
    def _crew_floats(self) -> int:
        """Floats of a crew's part of the arena."""
        return self.heads * max(self.layout.head_dim if self.own_queries else 0, self.layout.page_size)

    @property
    def _first_floats(self) -> int:
        """Floats of what stands in the arena before the crews' parts: queries that all pages share."""
        return 0 if self.own_queries else self.blocks * self.heads * self.layout.head_dim

    @property
    def arena(self) -> int:
        """Floats of the memory for queries, then scores, then weights of a page, and in the end for sums.

        Queries that are made for a page give their place to its scores: a GPU runs as many workgroups at once
        as it has shared memory for.
        """
        sums = self.crews * self.heads * self.layout.head_dim
        return max(sums, self._first_floats + self.crews * self._crew_floats)

    def queries_start(self, crew: Crew) -> Any:
        """Where the queries of a crew begin in the arena."""
        if self.own_queries:
            return crew.index * self._crew_floats
        return crew.block * (self.heads * self.layout.head_dim)

    def weights_start(self, crew: Crew) -> Any:
        """Where the scores and weights of a crew begin in the arena."""
        return crew.index * self._crew_floats + self._first_floats

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a workgroup."""
        layout, each = self.layout, CREW + PARTS + 2
        header = header_words(layout) if self.own_queries else 0
        return 4 * (self.arena + self.crews * (each * self.heads + header))


def decode_tile(layout: KVLayout, num_heads: int, limits: GpuLimits) -> DecodeTile | None:
    """The tile for a layout; None if the group or the workgroup's memory does not suit."""
    group = num_heads // layout.num_kv_heads
    most = min(_HEADS, _SCORES * LANES // layout.page_size)
    heads = min(most, 1 << (group - 1).bit_length())
    for crews in (_MOST_CREWS, _MOST_CREWS // 2):
        tile = DecodeTile(layout, group, heads, crews)
        if tile.pages and tile.shared_bytes <= limits.shared_bytes and tile.threads <= limits.threads:
            return tile
    return None


class Crew:
    """A thread's place: expressions, int32.

    Attributes
    ----------
    index, member
        The thread's crew, and its place in it.
    lane, team
        Its place in its team, and the team's in the crew.
    block, slot
        The crew's block of query heads, and its page among those of the workgroup.
    """

    def __init__(self, tile: DecodeTile, thread: Any) -> None:
        self.index = held(T.truncdiv(thread, CREW))
        self.member = held(T.bitwise_and(thread, CREW - 1))
        self.lane = held(T.bitwise_and(thread, LANES - 1))
        self.team = held(T.shift_right(self.member, 4))
        self.block = held(T.truncmod(self.index, tile.blocks))
        self.slot = held(T.truncdiv(self.index, tile.blocks))

    slices = 2

    def first(self, first: int = 0) -> Any:
        """The team's first of things of which slice ``first`` has the first one."""
        return self.team if first % 2 == 0 else held(1 - self.team)

    def for_slice(self, count: int, body, first: int = 0) -> None:
        """Emit ``body(i)`` for the team's half of ``count`` things; slice ``first`` has the first one."""
        start = self.first(first)
        steps = count // 2 if count % 2 == 0 else held(T.truncdiv(count - start + 1, 2))
        with T.serial(steps) as step:
            body(held(step * 2 + start))
