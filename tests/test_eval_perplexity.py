"""The arithmetic of the evaluation, against plain float64 formulas and a model that needs no library."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvq.errors import ConfigError
from kvq.eval.metrics import Distributions
from kvq.eval.perplexity import rows_of, score, windows
from kvq.layout import KVLayout

VOCAB = 50


class Bigram:
    """A model whose logits depend on the token and its position in the window, as a cache would make them."""

    def __init__(self, noise: float, k_bits: int | None, page_size: int = 32) -> None:
        rng = np.random.RandomState(0)
        self.table = rng.standard_normal((VOCAB, VOCAB)).astype(np.float32) * 3
        self.table += noise * np.random.RandomState(1).standard_normal(self.table.shape).astype(np.float32)
        self.layout = KVLayout(1, 1, 64, k_bits=k_bits, v_bits=k_bits, page_size=page_size)
        self.length = 0
        self.chunks: list[int] = []
        self.description = f"{k_bits} bits"

    def quantized_keys(self, positions: np.ndarray) -> np.ndarray:
        page = self.layout.page_size if self.layout.k_bits else 1_000_000
        return positions // page * page

    def bits_per_value(self, head_dim: int) -> float:
        return replace(self.layout, head_dim=head_dim).bits_per_value

    def reset(self) -> None:
        self.length = 0

    def prefill(self, ids: np.ndarray, logit_rows: np.ndarray) -> np.ndarray:
        positions = self.length + np.arange(len(ids))
        self.length += len(ids)
        self.chunks.append(len(ids))
        logits = self.table[ids] + 0.01 * positions[:, None] * self.table[0]
        return logits[logit_rows].astype(np.float32)


def direct(model: Bigram, tokens: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """float64 log-probabilities ``[n, VOCAB]`` and targets, for windows that do not overlap."""
    rows, targets = [], []
    for begin in range(0, len(tokens), window):
        part = tokens[begin : begin + window]
        if len(part) < 2:
            continue
        positions = np.arange(len(part) - 1)
        logits = model.table[part[:-1]] + 0.01 * positions[:, None] * model.table[0]
        logits = logits.astype(np.float64)
        rows.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
        targets.append(part[1:])
    return np.concatenate(rows), np.concatenate(targets)


@pytest.mark.parametrize("chunk", [1, 7, 33, 1000])
def test_matches_the_plain_formulas(chunk: int) -> None:
    tokens = np.random.RandomState(3).randint(0, VOCAB, 500).astype(np.int32)
    models = [Bigram(0.0, None), Bigram(0.3, 4)]
    window = 90
    scores = score(models, tokens, window=window, stride=window, chunk=chunk)
    none, int4 = rows_of(["none", "int4"], models, scores, window=window, stride=window, chunk=chunk)
    (p, targets), (q, _) = direct(models[0], tokens, window), direct(models[1], tokens, window)
    n = np.arange(len(targets))
    nll_p, nll_q = -p[n, targets], -q[n, targets]
    kl = (np.exp(p) * (p - q)).sum(-1)
    assert none.scored_tokens == int4.scored_tokens == len(targets)
    assert none.perplexity == pytest.approx(np.exp(nll_p.mean()), rel=1e-5)
    assert int4.perplexity == pytest.approx(np.exp(nll_q.mean()), rel=1e-5)
    assert int4.delta_percent == pytest.approx(100 * (np.exp(nll_q.mean() - nll_p.mean()) - 1), rel=1e-3)
    assert int4.stderr == pytest.approx(
        np.exp(nll_q.mean()) * nll_q.std(ddof=1) / np.sqrt(len(nll_q)), rel=1e-4
    )
    assert int4.kl == pytest.approx(kl.mean(), rel=1e-4)
    assert int4.kl_stderr == pytest.approx(kl.std(ddof=1) / np.sqrt(len(kl)), rel=1e-4)
    half = 1.96 * nll_q.std(ddof=1) / np.sqrt(len(nll_q))
    assert int4.perplexity_low == pytest.approx(np.exp(nll_q.mean() - half), rel=1e-4)
    assert int4.perplexity_high == pytest.approx(np.exp(nll_q.mean() + half), rel=1e-4)
    assert int4.bits_per_value == models[1].layout.bits_per_value
    assert 4 < int4.bits_per_value_d128 < int4.bits_per_value
    assert int4.kl_p99 == pytest.approx(np.percentile(kl, 99), rel=1e-4)
    assert int4.top1_percent == pytest.approx(100 * (p.argmax(-1) == q.argmax(-1)).mean())
    assert 50 < int4.top1_percent < 100
    assert (none.delta_percent, none.kl, none.top1_percent, none.quantized_keys) == (0.0, 0.0, 100.0, 0)
    assert max(models[1].chunks) <= chunk


def test_counts_the_keys_that_were_codes() -> None:
    tokens = np.random.RandomState(3).randint(0, VOCAB, 101).astype(np.int32)
    models = [Bigram(0.0, None), Bigram(0.0, 4)]
    scores = score(models, tokens, window=101, stride=101, chunk=40)
    positions = range(100)  # queries of one window of 101 tokens, pages of 32
    assert scores[1].keys == scores[0].keys == sum(p + 1 for p in positions)
    assert scores[1].quantized_keys == sum(p // 32 * 32 for p in positions)
    assert scores[0].quantized_keys == 0


@pytest.mark.parametrize(
    ("num_tokens", "window", "stride"), [(500, 90, 90), (500, 90, 30), (91, 90, 90), (2, 9, 9)]
)
def test_every_token_is_scored_once(num_tokens: int, window: int, stride: int) -> None:
    parts = list(windows(num_tokens, window, stride))
    scored = [t for part in parts for t in range(part.first, part.end)]
    assert len(scored) == len(set(scored))
    assert all(part.end - part.begin <= window for part in parts)
    lost = set(range(1, num_tokens)) - set(scored)
    # Without overlap the first token of each window has nothing before it.
    assert lost == (
        {part.begin for part in windows(num_tokens + 1, window, stride)} - {0} if stride == window else set()
    )
    if stride < window:
        assert all(part.first - part.begin >= window - stride for part in parts[1:-1])


def test_a_stride_sees_more_context() -> None:
    """Overlapping windows score the same tokens once each, from at least window - stride tokens on."""
    tokens = np.random.RandomState(4).randint(0, VOCAB, 200).astype(np.int32)
    (result,) = score([Bigram(0.0, None)], tokens, window=64, stride=16, chunk=50)
    assert len(result.nll) == 199


@pytest.mark.parametrize(
    ("num_tokens", "window", "stride"), [(1, 8, 8), (100, 8, 9), (100, 8, 0), (100, 1, 1)]
)
def test_sizes_that_make_no_sense_are_refused(num_tokens: int, window: int, stride: int) -> None:
    with pytest.raises(ConfigError):
        list(windows(num_tokens, window, stride))


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.float64)
    exact -= exact.max(-1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(-1, keepdims=True))


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_distributions_are_exact(offset: float) -> None:
    """More rows than a thread takes at once; an offset costs digits of the logits, and no more."""
    rng = np.random.RandomState(5)
    logits = (rng.standard_normal((11, 5000)) * 4 + offset).astype(np.float32)
    other = (logits + 0.1 * rng.standard_normal(logits.shape) + 1.5).astype(np.float32)
    targets = rng.randint(0, 5000, 11)
    p, q = log_probabilities(logits), log_probabilities(other)
    found, compared = Distributions.of(logits, probabilities=True), Distributions.of(other)
    assert found.nll(targets) == pytest.approx(-p[np.arange(11), targets], abs=1e-6)
    assert (found.top == p.argmax(-1)).all()
    assert found.kl(compared) == pytest.approx((np.exp(p) * (p - q)).sum(-1), abs=1e-6)
    assert found.kl(Distributions.of(logits.copy())).max() == 0.0


def test_a_tiny_divergence_is_not_negative() -> None:
    rng = np.random.RandomState(6)
    logits = rng.standard_normal((4, 5000)).astype(np.float32)
    nudged = logits + 1e-4 * rng.standard_normal(logits.shape).astype(np.float32)
    kl = Distributions.of(logits, probabilities=True).kl(Distributions.of(nudged))
    assert 0 <= kl.min() <= kl.max() < 1e-6
