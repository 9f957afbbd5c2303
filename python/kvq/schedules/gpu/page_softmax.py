"""Online softmax of a page: the scores of a tile's queries become weights of its values.

A team's scores are of its slice of the channels. The slices of a block of states share its states out, add
their scores up in shared memory, and meet there once more, 16 threads a state, for the maximum; scores, then
weights, stand where those of the first slice stood. A state's sum of weights stays in 16 parts to the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm.script import tirx as T

from kvq.schedules.attention_variant import AttentionVariant
from kvq.schedules.statements import put, when

from .attention_tile import LANES, Team, Tile
from .block import held, local, shared, sync
from .halves import half_of, half_to_float
from .page_keys import KeyScores

#: Score of a masked key: far below any real one, and finite, so that no NaN can come of it.
MASKED = -1e30


class Shared(NamedTuple):
    """Shared memory: scores, then weights; maxima of a page and sums of weights by lane; and by state, maxima
    so far (those of odd pages apart) and factors."""

    arena: Any
    peaks: Any
    totals: Any
    peak: Any
    factors: Any


def softmax_memory(tile: Tile) -> Shared:
    """Declare it."""
    lanes = (tile.states * LANES,)
    return Shared(
        shared((tile.arena_floats,), "float32"),
        shared(lanes, "float32"),
        shared(lanes, "float32"),
        shared((2, tile.states), "float32"),
        shared((tile.states,), "float32"),
    )


class PageSoftmax:
    """Statements of the thread for every ``slices``-th state of its team's block."""

    def __init__(
        self, tile: Tile, team: Team, variant: AttentionVariant, keys: KeyScores, memory: Shared
    ) -> None:
        self.tile, self.team, self.layout, self.variant = tile, team, tile.layout, variant
        self.keys, self.memory = keys, memory
        self.scores = local((tile.tokens,), "float32")
        self.value_scale = local((tile.tokens,), "float32")
        self.sum = local((1,), "float32")
        self.first_state = held(team.block * tile.team_states)

    def each(self, body) -> None:
        """Emit ``body(state)`` for the states that the thread answers for."""
        working = self.team.slice < self.team.slices
        when(
            working,
            lambda: self.team.for_slice(self.tile.team_states, lambda i: body(held(self.first_state + i))),
        )

    def clear(self) -> None:
        """Start from nothing."""

        def one(state):
            put(self.memory.totals, T.float32(0), state * LANES + self.team.lane)
            for parity in range(2):
                when(
                    self.team.lane == 0,
                    lambda parity=parity: put(self.memory.peak, T.float32(MASKED), parity, state),
                )

        self.each(one)

    def load_scales(self, pool, unit) -> None:
        """The values' scales of the thread's tokens, for the numbers of :class:`.page_values.ValueSums`."""
        if self.layout.v_bits is None:
            return
        for t in range(self.tile.tokens):
            token = self.keys.token(t)
            word = pool[(*unit, T.shift_right(token, 1) + self.layout.v_scale_offset)]
            put(self.value_scale, half_to_float(half_of(word, token)), t)

    def unit_scales(self) -> None:
        """Scales of values that are not quantized."""
        for t in range(self.tile.tokens):
            put(self.value_scale, T.float32(1), t)

    def offer(self, first, end) -> None:
        """Add the slices' scores up, cap them, offer their maximum. Contains a barrier; another must follow.

        Tokens outside of ``first(state) .. end(state) - 1`` are hidden; ``first`` is None without a window.
        """
        tile, team, arena, page = self.tile, self.team, self.memory.arena, self.layout.page_size
        own = held(team.index * (tile.team_states * page))
        for i in range(tile.team_states):
            for t in range(tile.tokens):
                put(arena, self.keys.scores[t, i], own + i * page + self.keys.token(t))
        sync()
        stride = held(team.blocks * (tile.team_states * page))

        def one(state):
            for t in range(tile.tokens):
                put(self.scores, T.float32(0), t)
            with T.serial(team.slices) as s:
                place = held(s * stride + state * page)
                for t in range(tile.tokens):
                    put(self.scores, self.scores[t] + arena[place + self.keys.token(t)], t)
            begin, stop = first and held(first(state)), held(end(state))
            most = T.float32(MASKED)
            for t in range(tile.tokens):
                token, score = self.keys.token(t), T.bind(self.scores[t])
                if self.variant.softcap is not None:
                    score = capped(score, self.variant.softcap)
                visible = token < stop if begin is None else T.And(token >= begin, token < stop)
                score = held(T.Select(visible, score, T.float32(MASKED)), "float32")
                put(arena, score, state * page + token)
                most = held(T.max(most, score), "float32")
            put(self.memory.peaks, most, state * LANES + team.lane)

        self.each(one)

    def weigh(self, parity) -> None:
        """Scores to weights, times the values' scales; and the factors that sums fade by. A barrier follows.

        ``parity`` says which maxima are those so far.
        """
        page, lane, memory = self.layout.page_size, self.team.lane, self.memory

        def one(state):
            before = T.bind(memory.peak[parity, state])
            now = before
            for i in range(LANES):
                now = held(T.max(now, memory.peaks[state * LANES + i]), "float32")
            fade = T.bind(T.exp(before - now))
            put(self.sum, memory.totals[state * LANES + lane] * fade, 0)
            for t in range(self.tile.tokens):
                place = held(state * page + self.keys.token(t))
                score = T.bind(memory.arena[place])
                # where a row sees nothing, the maximum is a masked score
                weight = T.Select(score > T.float32(MASKED), T.exp(score - now), T.float32(0))
                weight = held(weight, "float32")
                put(self.sum, self.sum[0] + weight, 0)
                put(memory.arena, weight * self.value_scale[t], place)
            put(memory.totals, self.sum[0], state * LANES + lane)

            def tell():
                put(memory.peak, now, 1 - parity, state)
                put(memory.factors, fade, state)

            when(lane == 0, tell)

        self.each(one)


def capped(score, cap: float):
    """``cap * tanh(score / cap)``, by the magnitude, so that nothing overflows."""
    negative = score < T.float32(0)
    magnitude = T.Select(negative, T.float32(0) - score, score)
    fading = held(T.exp(magnitude * T.float32(-2 / cap)), "float32")
    ratio = held((T.float32(1) - fading) / (T.float32(1) + fading) * T.float32(cap), "float32")
    return held(T.Select(negative, T.float32(0) - ratio, ratio), "float32")
