"""Perplexity, KL divergence and agreement, accumulated over blocks of logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities, float32, of logits ``[m, vocab]``; sums are taken in float64."""
    shifted = logits.astype(np.float32) - logits.max(axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    shifted -= np.log(total).astype(np.float32)
    return shifted


def kl_divergence(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(reference || other) of each row in nats, float64 ``[m]``, of log-probabilities ``[m, vocab]``.

    Rounding can leave a few 1e-7 below zero where the two agree; those are cut off.
    """
    terms = np.exp(reference)
    terms *= reference - other
    return np.maximum(terms.sum(axis=-1, dtype=np.float64), 0.0)


@dataclass
class Scores:
    """What one scheme got on the scored tokens, in the order in which they were scored.

    Attributes
    ----------
    nll : list of float
        Negative log-likelihood of each scored token, in nats.
    kl : list of float
        KL(none || scheme) of the distribution that each of them was drawn from, in nats.
    agree : int
        Tokens for which the scheme's most likely token is that of ``none``.
    quantized_keys, keys : int
        Keys that the scored queries attended to: in sealed quantized pages, and in all.
    """

    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agree: int = 0
    quantized_keys: int = 0
    keys: int = 0

    def add(self, log_probs: np.ndarray, targets: np.ndarray, reference: np.ndarray) -> None:
        """Score ``targets`` ``[m]`` under ``log_probs`` ``[m, vocab]``, against the reference's."""
        self.nll.extend((-log_probs[np.arange(len(targets)), targets]).tolist())
        self.kl.extend(kl_divergence(reference, log_probs).tolist())
        self.agree += int((log_probs.argmax(axis=-1) == reference.argmax(axis=-1)).sum())

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return math.exp(np.mean(self.nll))

    @property
    def stderr(self) -> float:
        """Standard error of the perplexity, tokens taken as independent (delta method)."""
        return self.perplexity * _standard_error(np.array(self.nll))

    def delta_percent(self, reference: Scores) -> float:
        """Perplexity above the reference's, in percent of it."""
        return 100.0 * math.expm1(np.mean(self.nll) - np.mean(reference.nll))

    def delta_stderr(self, reference: Scores) -> float:
        """Standard error of :meth:`delta_percent`, from the differences token by token."""
        spread = _standard_error(np.array(self.nll) - np.array(reference.nll))
        return (100.0 + self.delta_percent(reference)) * spread


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
