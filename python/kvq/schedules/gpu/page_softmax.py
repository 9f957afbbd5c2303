"""Online softmax of a page: the scores of a tile's queries become weights of its values.

A team's scores are of its slice of the channels. The slices of a block of states share its states out, add
their scores up in shared memory, and meet there once more, 16 threads a state, for the maximum; weights stand
where the scores of the first slice stood. Sums of weights meet at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm.script import tirx as T

from kvq.schedules.attention_variant import AttentionVariant

from .attention_tile import LANES, Team, Tile
from .block import local, put, sync, when
from .halves import half_of, half_to_float
from .page_keys import KeyScores

#: Score of a masked key: far below any real one, and finite, so that no NaN can come of it.
MASKED = -1e30


class Shared(NamedTuple):
    """Shared memory: scores, then weights; of each state the lanes' maxima, and a factor."""

    arena: Any
    peaks: Any
    factors: Any


class PageSoftmax:
    """Maximum and sum of each state that the thread answers for: every ``slices``-th of its team's block."""

    def __init__(
        self, tile: Tile, team: Team, variant: AttentionVariant, keys: KeyScores, memory: Shared
    ) -> None:
        self.tile, self.team, self.layout, self.variant = tile, team, tile.layout, variant
        self.keys, self.memory = keys, memory
        self.peak, self.total = (local((tile.team_states,), "float32") for _ in range(2))
        self.value_scale = local((tile.tokens,), "float32")

    def clear(self) -> None:
        """Start from nothing."""
        for k in range(self.tile.team_states):
            put(self.peak, T.float32(MASKED), k)
            put(self.total, T.float32(0), k)

    def each(self, body) -> None:
        """Emit ``body(k, state)`` for the states that the thread answers for."""
        team, states = self.team, self.tile.team_states
        for k in range(states):
            i = T.bind(team.slice + team.slices * k)

            def one(k=k, i=i):
                body(k, T.bind(team.block * states + i))

            when(T.And(i < states, team.slice < team.slices), one)

    def add_up(self) -> None:
        """Bring the slices' scores together, in ``scores[t, k]`` of state ``k``. Contains a barrier."""
        tile, team, page, scores = self.tile, self.team, self.layout.page_size, self.keys.scores
        arena = self.memory.arena
        first = T.bind(team.index * (tile.team_states * page))
        for i in range(tile.team_states):
            for t in range(tile.tokens):
                put(arena, scores[t, i], first + i * page + self.keys.token(t))
        sync()
        stride = T.bind(team.blocks * (tile.team_states * page))

        def add(k, state):
            for t in range(tile.tokens):
                put(scores, T.float32(0), t, k)
            with T.serial(team.slices) as s:
                place = T.bind(s * stride + state * page)
                for t in range(tile.tokens):
                    put(scores, scores[t, k] + arena[place + self.keys.token(t)], t, k)

        self.each(add)

    def load_scales(self, pool, unit) -> None:
        """The values' scales of the thread's tokens, for the numbers of :class:`.page_values.ValueSums`."""
        bits = self.layout.v_bits
        if bits is None:
            return
        for t in range(self.tile.tokens):
            token = T.bind(self.keys.token(t))
            word = pool[(*unit, T.shift_right(token, 1) + self.layout.v_scale_offset)]
            scale = half_to_float(half_of(word, token)) * T.float32(2.0**bits)
            put(self.value_scale, scale, t)

    def mask(self, first, end) -> None:
        """Cap the scores, hide the tokens outside of ``first(state) .. end(state) - 1``, offer the maximum.

        Either is None where every row sees all. A barrier must follow.
        """

        def one(k, state):
            begin, stop = (bound and T.bind(bound(state)) for bound in (first, end))
            most = T.float32(MASKED)
            for t in range(self.tile.tokens):
                score, token = self.keys.scores[t, k], self.keys.token(t)
                if self.variant.softcap is not None:
                    score = _capped(T.bind(score), self.variant.softcap)
                if begin is not None:
                    score = T.Select(token >= begin, score, T.float32(MASKED))
                if stop is not None:
                    score = T.Select(token < stop, score, T.float32(MASKED))
                score = T.bind(score)
                put(self.keys.scores, score, t, k)
                most = T.bind(T.max(most, score))
            put(self.memory.peaks, most, state * LANES + self.team.lane)

        self.each(one)

    def weigh(self, scaled: bool, masked: bool) -> None:
        """Weights, scaled for codes or not, and the factors that sums fade by. A barrier must follow."""
        page, lane, memory = self.layout.page_size, self.team.lane, self.memory

        def one(k, state):
            before = T.bind(self.peak[k])
            now = before
            for i in range(LANES):
                now = T.bind(T.max(now, memory.peaks[state * LANES + i]))
            fade = T.bind(T.exp(before - now))
            total = T.bind(self.total[k] * fade)
            for t in range(self.tile.tokens):
                score = T.bind(self.keys.scores[t, k])
                weight = T.exp(score - now)
                if masked:  # where a row sees nothing, the maximum is a masked score
                    weight = T.Select(score > T.float32(MASKED), weight, T.float32(0))
                weight = T.bind(weight)
                total = T.bind(total + weight)
                place = state * page + self.keys.token(t)
                put(memory.arena, weight * self.value_scale[t] if scaled else weight, place)
            put(self.peak, now, k)
            put(self.total, total, k)
            when(lane == 0, lambda: put(memory.factors, fade, state))

        self.each(one)

    def offer(self) -> None:
        """Sums to where the maxima were, maxima to where the factors were, between two barriers."""

        def one(k, state):
            put(self.memory.peaks, self.total[k], state * LANES + self.team.lane)
            when(self.team.lane == 0, lambda: put(self.memory.factors, self.peak[k], state))

        self.each(one)


def _capped(score, cap: float):
    """``cap * tanh(score / cap)``, by the magnitude, so that nothing overflows."""
    negative = T.bind(score < T.float32(0))
    magnitude = T.Select(negative, T.float32(0) - score, score)
    fading = T.bind(T.exp(magnitude * T.float32(-2 / cap)))
    ratio = T.bind((T.float32(1) - fading) / (T.float32(1) + fading) * T.float32(cap))
    return T.Select(negative, T.float32(0) - ratio, ratio)
