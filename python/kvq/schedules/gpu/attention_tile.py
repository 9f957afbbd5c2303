"""How the threads of a workgroup share a tile of attention, and what of it stands in shared memory.

A *state* is one query: a row of the task and a head of the group. A workgroup has teams of 16 threads. A team
has a block of states and a slice of each page: of its channels for the scores, where each thread has every
16th token, and of its tokens for the sums of values, where each thread has every 16th channel. A tile of few
states has few blocks and many slices, a full one as many blocks as teams. So a word of codes is read by
neighbouring threads in neighbouring places, and what a thread unpacks serves all states of its block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from kvq.errors import CompileError
from kvq.layout import K_LANES, KVLayout

from .block import held
from .key_header import header_words
from .limits import GpuLimits

#: Threads of a team: what the order of the key codes is made for.
LANES = K_LANES
TEAMS = 8
THREADS = TEAMS * LANES
#: Threads of a workgroup that merges the results of a split row: at least the largest head_dim.
MERGE_THREADS = 256
#: Most scores of a page that a thread holds, and most states of a team.
_SCORES, _STATES = 16, 4


@dataclass(frozen=True)
class Tile:
    """The static part: what is the same for every task.

    Attributes
    ----------
    layout : KVLayout
    group : int
        Query heads of a KV head.
    team_states : int
        States of a team.
    """

    layout: KVLayout
    group: int
    team_states: int

    @property
    def states(self) -> int:
        """States of a full tile."""
        return self.team_states * TEAMS

    @property
    def rows(self) -> int:
        """Most rows of a task."""
        return self.states // self.group

    @property
    def tokens(self) -> int:
        """Tokens of a page of which a thread has scores."""
        return self.layout.page_size // LANES

    @property
    def arena_floats(self) -> int:
        """Floats of the shared memory for scores and weights, and in the end for sums."""
        return TEAMS * max(self.team_states * self.layout.page_size, self.layout.head_dim)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a workgroup."""
        layout, words = self.layout, self.arena_floats + self.states * (2 * LANES + 3)
        if layout.k_bits is not None:
            words += 2 * layout.head_dim + header_words(layout)
            words += layout.head_dim if len(layout.k_classes) > 1 else 0
        return 4 * words


def make_tile(layout: KVLayout, num_heads: int, limits: GpuLimits) -> Tile:
    """The tile for a layout.

    Raises
    ------
    CompileError
        If the GPU's workgroups or their shared memory are too small, or the group is too large.
    """
    group = num_heads // layout.num_kv_heads
    most = min(_STATES, _SCORES * LANES // layout.page_size)
    states = -(-group // -(-group // most))
    # two, however small the group is: several rows share what is unpacked
    tile = Tile(layout, group, min(max(states, 2), most))
    if limits.threads < MERGE_THREADS:
        raise CompileError(
            f"attention needs workgroups of {MERGE_THREADS} threads: the GPU has {limits.threads}"
        )
    if tile.shared_bytes > limits.shared_bytes:
        raise CompileError(
            f"attention of head_dim {layout.head_dim} needs {tile.shared_bytes} bytes of shared memory:"
            f" the GPU has {limits.shared_bytes}"
        )
    if group > tile.states:
        raise CompileError(
            f"attention of {group} query heads a KV head is not supported with pages of {layout.page_size}:"
            f" at most {tile.states} are"
        )
    return tile


class Team:
    """A thread's place in a task of so many states: expressions, int32.

    Attributes
    ----------
    lane, index
        The thread's place in its team, and the team's.
    block, slice
        The team's block of states, and its slice; teams beyond the last slice work in vain.
    blocks, slices
        How many there are.
    """

    def __init__(self, tile: Tile, num_states: Any, thread: Any) -> None:
        self.lane = held(T.bitwise_and(thread, LANES - 1))
        self.index = held(T.truncdiv(thread, LANES))
        self.blocks = held(T.truncdiv(num_states + (tile.team_states - 1), tile.team_states))
        self.slices = held(T.truncdiv(TEAMS, self.blocks))
        self.block = held(T.truncmod(self.index, self.blocks))
        self.slice = held(T.truncdiv(self.index, self.blocks))

    def first(self, first: int = 0) -> Any:
        """The thread's first of things of which slice ``first`` has the first one."""
        if not first:
            return self.slice
        return held(T.truncmod(self.slice + first * (self.slices - 1), self.slices))

    def for_slice(self, count: Any, body, first: int = 0) -> None:
        """Emit ``body(i)`` for the slice's share of ``count`` things; slice ``first`` has the first one."""
        start = self.first(first)
        with T.serial(held(T.truncdiv(count - start + (self.slices - 1), self.slices))) as step:
            body(held(step * self.slices + start))
