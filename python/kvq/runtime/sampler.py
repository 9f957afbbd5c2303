"""Draws tokens from logits.

A draw depends on the logits and on (seed, choice, position) alone, never on what ran before it or
beside it: the same request gives the same tokens alone, in a batch, or after a restart half-way.

A token's weight is ``exp((logit - largest) / temperature)`` in float32, its *mass* the weight in whole units
of 2^-41. Sums of masses are exact, so a device that adds them up in another order draws the same token from
the same weights (``schedules/cuda/draw.py``).
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvq.errors import ConfigError
from kvq.runtime.philox import uniform

#: Units of mass of the likeliest token: 2 to this power.
MASS_BITS = 41
#: int32 that tell a device how to draw a token: temperature, top_k, top_p, min_p (float32 but top_k), the low
#: and high half of the seed, choice, position. All zeros ask for the likeliest token.
DRAW_FIELDS = 8
#: Candidates that are sorted first; nearly always they hold all of top-p.
_FIRST_CANDIDATES = (256, 4096)
#: Ids that are looked at together where only a few of all matter.
_BLOCK = 256
#: Temperatures below this are greedy: dividing by them would overflow float32.
_GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """How to draw.

    Attributes
    ----------
    temperature : float
        0 is greedy.
    top_p, top_k, min_p : float, int, float
        Keep the likeliest tokens of mass ``top_p``, the ``top_k`` likeliest (0: all), those with at
        least ``min_p`` of the likeliest one's probability.
    repetition_penalty : float
        Divides positive and multiplies negative logits of tokens of the prompt or the answer.
    presence_penalty, frequency_penalty : float
        Subtracted once, and once for each occurrence, from logits of tokens of the answer.
    logit_bias : mapping of int to float
        Added to the logits of these ids.
    top_logprobs : int or None
        None reports no log probabilities; k reports the drawn token's and the k likeliest.
    seed : int or None
        None chooses one at random.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, valid, wanted in (
            ("temperature", 0 <= self.temperature < float("inf"), "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "between 0.01 and 100"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("top_logprobs", self.top_logprobs is None or 0 <= self.top_logprobs <= 20, "between 0 and 20"),
        ):
            if not valid:
                raise ConfigError(f"{name} {getattr(self, name)} is not possible: it must be {wanted}")

    @property
    def is_greedy(self) -> bool:
        """Whether the token is the likeliest."""
        return self.temperature < _GREEDY_TEMPERATURE

    @property
    def changes_logits(self) -> bool:
        """Whether the token is drawn from other logits than the model's own."""
        return self.repetition_penalty != 1 or bool(
            self.presence_penalty or self.frequency_penalty or self.logit_bias
        )


def check_bias(params: SamplingParams, vocab_size: int) -> None:
    """Refuse a bias for ids that do not exist.

    Raises
    ------
    ConfigError
        Names the first one.
    """
    outside = [token for token in params.logit_bias if not 0 <= token < vocab_size]
    if outside:
        raise ConfigError(f"logit_bias names token {outside[0]}: ids are 0 .. {vocab_size - 1}")


class SampledToken(NamedTuple):
    """A drawn token; log probabilities are the model's own, before penalties and temperature."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class _Scratch(threading.local):
    """Arrays for a thread's draws: new ones of this size would cost more than what is computed in them."""

    def __init__(self) -> None:
        self._size = -1

    def take(self, size: int) -> _Scratch:
        """The arrays, ``[size]``; good until the next draw."""
        if size != self._size:
            self._size = size
            self.weights, self.scaled = np.empty(size, np.float32), np.empty(size, np.float32)
            self.masses = np.empty(size, np.int64)
        return self


_scratch = _Scratch()


class Sampler:
    """Draws the tokens of one choice of one request.

    Parameters
    ----------
    params : SamplingParams
    prompt : iterable of int
        Token ids of the prompt, which the repetition penalty counts.
    vocab_size : int
        Ids from here on are padding and never drawn.
    choice : int
        Index among the request's ``n`` answers.
    """

    def __init__(
        self, params: SamplingParams, prompt: Iterable[int], vocab_size: int, choice: int = 0
    ) -> None:
        self.params = params
        self._vocab_size = vocab_size
        self._counts: Counter[int] = Counter()
        self._prompt = set(prompt) if params.repetition_penalty != 1 else set()
        seed = int.from_bytes(os.urandom(8), "little") if params.seed is None else params.seed
        self._seed, self._choice = seed % 2**64, choice
        self._device_fields = self._make_device_fields()
        check_bias(params, vocab_size)

    def device_draw(self, position: int) -> np.ndarray:
        """How a device draws the token that stands at ``position``, int32 ``[DRAW_FIELDS]``."""
        fields = self._device_fields.copy()
        if fields[0]:
            fields[-1] = position
        return fields

    def _make_device_fields(self) -> np.ndarray:
        """What :meth:`device_draw` gives, but for the position."""
        p = self.params
        fields = np.zeros(DRAW_FIELDS, np.uint32)
        if not p.is_greedy:
            fields[[0, 2, 3]] = np.array([p.temperature, p.top_p, p.min_p], np.float32).view(np.uint32)
            fields[1] = min(p.top_k, self._vocab_size)
            fields[4:7] = self._seed % 2**32, self._seed >> 32, self._choice
        return fields.view(np.int32)

    def sample(self, logits: np.ndarray, position: int, allowed: np.ndarray | None = None) -> SampledToken:
        """Draw the token that stands at ``position`` of the sequence.

        Parameters
        ----------
        logits : numpy.ndarray
            float32 ``[V]``; not modified.
        allowed : numpy.ndarray, optional
            bool ``[>= V]``: the tokens that may be drawn, at least one.
        """
        logits = logits[: self._vocab_size]
        changed = self._penalized(logits)
        if allowed is not None:
            changed = np.where(allowed[: self._vocab_size], changed, np.float32("-inf"))
        token = int(changed.argmax()) if self.params.is_greedy else self._draw(changed, position)
        self._counts[token] += 1
        return self.report(token, logits)

    def report(self, token: int, logits: np.ndarray | None) -> SampledToken:
        """A token that was drawn, with the log probabilities that are asked for.

        Parameters
        ----------
        logits : numpy.ndarray or None
            float32 ``[V]``, the model's own; None only if nothing is asked for.
        """
        if self.params.top_logprobs is None:
            return SampledToken(token)
        assert logits is not None
        return _with_logprobs(token, logits[: self._vocab_size], self.params.top_logprobs)

    def _penalized(self, logits: np.ndarray) -> np.ndarray:
        p = self.params
        if not p.changes_logits:
            return logits
        out = logits.copy()
        seen = np.fromiter(self._prompt | set(self._counts), np.int64)
        if p.repetition_penalty != 1 and len(seen):
            old = out[seen]
            out[seen] = np.where(old > 0, old / p.repetition_penalty, old * p.repetition_penalty)
        if self._counts:
            answer = np.fromiter(self._counts, np.int64)
            times = np.fromiter(self._counts.values(), np.float32)
            out[answer] -= np.float32(p.presence_penalty) + np.float32(p.frequency_penalty) * times
        for token, bias in p.logit_bias.items():
            out[token] += bias
        return out

    def _draw(self, logits: np.ndarray, position: int) -> int:
        weights = _scratch.take(len(logits)).weights
        np.subtract(logits, logits.max(), out=weights)
        weights /= np.float32(self.params.temperature)
        np.exp(weights, out=weights)
        return draw(weights, self.params, uniform(self._seed, self._choice, position))


def _with_logprobs(token: int, logits: np.ndarray, count: int) -> SampledToken:
    top, weights = logits.max(), _scratch.take(len(logits)).weights
    np.subtract(logits, top, out=weights)
    np.exp(weights, out=weights)
    total = float(top) + float(np.log(weights.sum(dtype=np.float64)))
    likeliest = _likeliest(logits, min(count, len(logits)))
    return SampledToken(
        token, float(logits[token]) - total, tuple((int(i), float(logits[i]) - total) for i in likeliest)
    )


def _likeliest(values: np.ndarray, count: int) -> np.ndarray:
    """Ids of the ``count`` largest values, the largest first, equal ones by id."""
    if not count:
        return np.empty(0, int)
    # The largest of each block tell which blocks can hold one of them: a few of hundreds.
    starts = np.arange(0, len(values), _BLOCK)
    highest = np.maximum.reduceat(values, starts)
    least = np.partition(highest, -count)[-count] if count < len(highest) else highest.min()
    ids = (starts[highest >= least][:, None] + np.arange(_BLOCK)).reshape(-1)
    ids = ids[: np.searchsorted(ids, len(values))]
    kept = values[ids]
    ids = ids[kept >= np.partition(kept, -count)[-count]]
    return ids[np.argsort(-values[ids], kind="stable")][:count]


def draw(weights: np.ndarray, params: SamplingParams, point: float) -> int:
    """Draw an id, each with the probability of its mass among those that the limits keep.

    Parameters
    ----------
    weights : numpy.ndarray
        float32 ``[V]``, the largest 1.
    point : float
        At least 0, below 1: how much of the kept mass, in the order of ids, lies before the token.
    """
    scratch = _scratch.take(len(weights))
    np.multiply(weights, np.float32(2**MASS_BITS), out=scratch.scaled)
    masses = scratch.masses
    np.copyto(masses, scratch.scaled, casting="unsafe")
    kept = _kept(weights, masses, params)
    if kept is not None:
        masses = masses[kept]
    # First the block of ids that the token is in, then the token.
    sums = np.cumsum(np.add.reduceat(masses, np.arange(0, len(masses), _BLOCK)))
    before = min(int(point * float(sums[-1])), int(sums[-1]) - 1)
    block = int(np.searchsorted(sums, before, side="right"))
    first = block * _BLOCK
    inside = np.cumsum(masses[first : first + _BLOCK])
    drawn = first + int(
        np.searchsorted(inside, before - (int(sums[block - 1]) if block else 0), side="right")
    )
    return drawn if kept is None else int(kept[drawn])


def _kept(weights: np.ndarray, masses: np.ndarray, params: SamplingParams) -> np.ndarray | None:
    """Ids that may be drawn, rising; None: all."""
    p = params
    if p.top_p == 1 and not p.min_p and not p.top_k:
        return None
    # as float32, like on a device
    enough = min(int(np.ceil(float(np.float32(p.top_p)) * float(masses.sum()))), int(masses.sum()))
    ids = _candidates(weights, masses, enough, p)
    end = len(ids) if not p.top_k else min(p.top_k, len(ids))
    end = min(end, int(np.searchsorted(-weights[ids], -np.float32(p.min_p), side="right")))
    if p.top_p < 1:
        end = min(end, int(np.searchsorted(np.cumsum(masses[ids[:end]]), enough)) + 1)
    return np.sort(ids[:end])


def _candidates(weights: np.ndarray, masses: np.ndarray, enough: int, params: SamplingParams) -> np.ndarray:
    """Ids with any weight, the heaviest first, equal ones by id: all, or the first that surely suffice."""
    positive = weights > 0
    ids = np.arange(len(weights)) if positive.all() else np.flatnonzero(positive)
    values = weights if len(ids) == len(weights) else weights[ids]
    for count in _FIRST_CANDIDATES:
        if len(values) <= count:
            break
        first = np.flatnonzero(values >= np.partition(values, -count)[-count])
        first = ids[first[np.argsort(-values[first], kind="stable")]]
        if (
            0 < params.top_k <= count
            or (params.top_p < 1 and masses[first].sum() >= enough)
            or weights[first[-1]] < params.min_p
        ):
            return first
    return ids[np.argsort(-values, kind="stable")]
