"""Draws tokens from logits.

A draw depends on the logits and on (seed, choice, position) alone, never on what ran before it or
beside it: the same request gives the same tokens alone, in a batch, or after a restart half-way.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvq.errors import ConfigError

#: Candidates that are sorted first; nearly always they hold all of top-p.
_FIRST_CANDIDATES = (256, 4096)
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
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("top_logprobs", self.top_logprobs is None or 0 <= self.top_logprobs <= 20, "between 0 and 20"),
        ):
            if not valid:
                raise ConfigError(f"{name} {getattr(self, name)} is not possible: it must be {wanted}")

    @property
    def takes_likeliest(self) -> bool:
        """Whether the token is the likeliest of the logits as they are, and nothing else is asked."""
        return (
            self.temperature < _GREEDY_TEMPERATURE
            and self.repetition_penalty == 1
            and not (self.presence_penalty or self.frequency_penalty or self.logit_bias)
            and self.top_logprobs is None
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


@dataclass(frozen=True)
class SampledToken:
    """A drawn token; log probabilities are the model's own, before penalties and temperature."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


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
        self._key = np.array([seed % 2**64, choice], np.uint64)
        check_bias(params, vocab_size)

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
        if self.params.temperature < _GREEDY_TEMPERATURE:
            token = int(changed.argmax())
        else:
            token = self._draw(changed, position)
        self._counts[token] += 1
        if self.params.top_logprobs is None:
            return SampledToken(token)
        return self._with_logprobs(token, logits, self.params.top_logprobs)

    def _penalized(self, logits: np.ndarray) -> np.ndarray:
        p = self.params
        if p.repetition_penalty == 1 and not (p.presence_penalty or p.frequency_penalty or p.logit_bias):
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
        p = self.params
        scaled = (logits - logits.max()) / np.float32(p.temperature)
        weights = np.exp(scaled, dtype=np.float32)
        total = float(weights.sum(dtype=np.float64))
        ids = self._candidates(weights, total)
        kept = (weights if ids is None else weights[ids]).astype(np.float64)
        end = len(kept) if not p.top_k else min(p.top_k, len(kept))
        if p.min_p:
            end = min(end, int(np.searchsorted(-kept, -p.min_p * kept[0], side="right")))
        cumulative = np.cumsum(kept[:end])
        if p.top_p < 1:
            end = min(end, int(np.searchsorted(cumulative, p.top_p * total)) + 1)
        bits = np.random.Philox(key=self._key, counter=[position, 0, 0, 0])
        point = np.random.Generator(bits).random() * cumulative[end - 1]
        drawn = min(end - 1, int(np.searchsorted(cumulative[:end], point, side="right")))
        return drawn if ids is None else int(ids[drawn])

    def _candidates(self, weights: np.ndarray, total: float) -> np.ndarray | None:
        """Ids in order of falling weight (equal ones by id): all, or the first that are sure to suffice.

        None where nothing is cut off: then all of them as they stand, since order is of no use.
        """
        p = self.params
        if p.top_p == 1 and not p.min_p and not p.top_k:
            return None
        for count in _FIRST_CANDIDATES:
            if len(weights) <= count:
                break
            first = np.flatnonzero(weights >= np.partition(weights, -count)[-count])
            first = first[np.argsort(-weights[first], kind="stable")]
            if (
                0 < p.top_k <= count
                or weights[first].sum(dtype=np.float64) >= p.top_p * total
                or weights[first[-1]] < p.min_p * weights[first[0]]
            ):
                return first
        return np.argsort(-weights, kind="stable")

    @staticmethod
    def _with_logprobs(token: int, logits: np.ndarray, count: int) -> SampledToken:
        count = min(count, len(logits))
        top = logits.max()
        total = float(top) + float(np.log(np.exp(logits - top).sum(dtype=np.float64)))
        likeliest = (
            np.flatnonzero(logits >= np.partition(logits, -count)[-count]) if count else np.empty(0, int)
        )
        likeliest = likeliest[np.argsort(-logits[likeliest], kind="stable")][:count]
        return SampledToken(
            token, float(logits[token]) - total, tuple((int(i), float(logits[i]) - total) for i in likeliest)
        )
