"""Perplexity, KL divergence and agreement, accumulated over blocks of logits.

A chunk of logits is tens of megabytes, and each scheme has its own: rows are taken a few at a time, so that
what is computed from them stays in the core's cache, on as many threads as there are cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from kvq.cpu_features import usable_cores

#: Rows that a thread works on at a time: a few hundred kilobytes each at the vocabularies of today.
_ROWS = 4
#: Quantile of the standard normal distribution that bounds 95% of it on both sides.
Z95 = 1.959964


@dataclass(frozen=True)
class Distributions:
    """What a model predicts for the tokens that follow ``m`` rows.

    Attributes
    ----------
    logits : numpy.ndarray
        float32 ``[m, vocab]``.
    log_total : numpy.ndarray
        float64 ``[m]``: the logarithm of the sum of ``exp(logits)``.
    top : numpy.ndarray
        int64 ``[m]``: the most likely token.
    probabilities : numpy.ndarray or None
        float32 ``[m, vocab]``, if they were asked for.
    """

    logits: np.ndarray
    log_total: np.ndarray
    top: np.ndarray
    probabilities: np.ndarray | None = None

    @classmethod
    def of(cls, logits: np.ndarray, *, probabilities: bool = False) -> Distributions:
        """Normalize float32 logits ``[m, vocab]``; they are kept, not copied."""
        count, vocab = logits.shape
        log_total, top = np.empty(count, np.float64), np.empty(count, np.int64)
        kept = np.empty(logits.shape, np.float32) if probabilities else None

        def normalize(begin: int, end: int) -> None:
            rows = logits[begin:end]
            top[begin:end] = rows.argmax(axis=-1)
            peak = np.take_along_axis(rows, top[begin:end, None], axis=-1)
            odds = np.empty((end - begin, vocab), np.float32) if kept is None else kept[begin:end]
            np.subtract(rows, peak, out=odds)
            np.exp(odds, out=odds)
            total = odds.sum(axis=-1, keepdims=True)
            if kept is not None:
                odds /= total
            log_total[begin:end] = (peak.astype(np.float64) + np.log(total.astype(np.float64)))[:, 0]

        _over_rows(count, normalize)
        return cls(logits, log_total, top, kept)

    def nll(self, targets: np.ndarray) -> np.ndarray:
        """Negative log-likelihood of the tokens ``targets`` ``[m]`` in nats, float64 ``[m]``."""
        return self.log_total - self.logits[np.arange(len(targets)), targets]

    def kl(self, other: Distributions) -> np.ndarray:
        """KL(self || other) of each row in nats, float64 ``[m]``; needs ``probabilities`` of ``self``.

        Rounding can leave less than 1e-6 below zero where the two agree; that is cut off.
        """
        assert self.probabilities is not None
        weights, count = self.probabilities, len(self.logits)
        mean_difference = np.empty(count, np.float64)

        def compare(begin: int, end: int) -> None:
            terms = self.logits[begin:end] - other.logits[begin:end]
            terms *= weights[begin:end]
            mean_difference[begin:end] = terms.sum(axis=-1)

        _over_rows(count, compare)
        return np.maximum(mean_difference - (self.log_total - other.log_total), 0.0)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(usable_cores())


def _over_rows(count: int, work: Callable[[int, int], None]) -> None:
    """Call ``work(begin, end)`` for all rows, a few at a time."""
    parts = [(begin, min(begin + _ROWS, count)) for begin in range(0, count, _ROWS)]
    for _ in _threads().map(lambda part: work(*part), parts):
        pass


@dataclass
class Scores:
    """What one scheme got on the scored tokens, in the order in which they were scored.

    Standard errors take the tokens as independent.

    Attributes
    ----------
    nll : list of float
        Negative log-likelihood of each scored token, in nats.
    kl : list of float
        KL(reference || scheme) of the distribution that each of them was drawn from, in nats.
    agree : int
        Tokens for which the scheme's most likely token is that of the reference.
    quantized_keys, keys : int
        Keys that the scored queries attended to: in sealed quantized pages, and in all.
    """

    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agree: int = 0
    quantized_keys: int = 0
    keys: int = 0

    def add(self, found: Distributions, targets: np.ndarray, reference: Distributions) -> None:
        """Score ``targets`` ``[m]`` under a scheme's distributions, against the reference's."""
        self.nll.extend(found.nll(targets).tolist())
        self.kl.extend(reference.kl(found).tolist())
        self.agree += int((found.top == reference.top).sum())

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return math.exp(np.mean(self.nll))

    @property
    def stderr(self) -> float:
        """Standard error of the perplexity (delta method)."""
        return self.perplexity * standard_error(self.nll)

    @property
    def interval(self) -> tuple[float, float]:
        """95% confidence interval of the perplexity: that of the mean log-likelihood, in perplexity."""
        half = Z95 * standard_error(self.nll)
        return self.perplexity * math.exp(-half), self.perplexity * math.exp(half)

    def delta_percent(self, reference: Scores) -> float:
        """Perplexity above the reference's, in percent of it."""
        return 100.0 * math.expm1(np.mean(self.nll) - np.mean(reference.nll))

    def delta_stderr(self, reference: Scores) -> float:
        """Standard error of :meth:`delta_percent`, from the differences token by token."""
        spread = standard_error(np.array(self.nll) - np.array(reference.nll))
        return (100.0 + self.delta_percent(reference)) * spread


def standard_error(values: list[float] | np.ndarray) -> float:
    """Standard error of the mean of independent values; NaN for fewer than two."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
