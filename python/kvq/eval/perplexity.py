"""Perplexity of a text under several cache schemes, token by token against a cache that rounds nothing.

The text is cut into windows; each is prefilled in chunks into an empty sequence, exactly as a prompt is
served, and every token but the first of a window is scored by the row before it (teacher forcing). A row
attends to what the cache holds: sealed, hence quantized, pages up to its own page. All schemes see the
same chunk before the next one starts, so the logits of one chunk are all that is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from kvq.errors import ConfigError, check_positive
from kvq.eval.metrics import Distributions, Scores, standard_error
from kvq.layout import KVLayout
from kvq.quantization.scheme import EXACT

#: Scheme that the others are compared with: no rounding of K and V, whatever the weights.
REFERENCE = EXACT
#: head_dim at which bits are reported beside the model's own: that of most models larger than the test's.
COMMON_HEAD_DIM = 128

#: Called with (done, total).
Progress = Callable[[int, int], None]


class Prefiller(Protocol):
    """One compiled model with one sequence, as the evaluation drives it."""

    @property
    def layout(self) -> KVLayout:
        """The layout of the cache that its library has."""

    @property
    def description(self) -> str:
        """How sealed pages are stored, in a line."""

    def quantized_keys(self, positions: np.ndarray) -> np.ndarray:
        """Of the keys that rows at int64 ``positions`` ``[n]`` attend to, how many were codes."""

    def bits_per_value(self, head_dim: int) -> float:
        """Bits that a sealed page stores per value at a head_dim, everything included."""

    def reset(self) -> None:
        """Empty the sequence."""

    def prefill(self, ids: np.ndarray, logit_rows: np.ndarray) -> np.ndarray:
        """Append int32 ``ids`` ``[n]``; the logits float32 ``[m, vocab]`` of ``logit_rows`` ``[m]``."""


@dataclass(frozen=True)
class Window:
    """Tokens ``begin .. end - 1`` of a text, of which those from ``first`` on are scored."""

    begin: int
    end: int
    first: int


@dataclass(frozen=True)
class Row:
    """The result of one scheme; the fields are the keys of ``--json``.

    ``scheme`` says how sealed pages are stored. ``stderr``, ``delta_stderr`` and ``kl_stderr`` are standard
    errors of ``perplexity``, ``delta_percent`` and ``kl``, and ``perplexity_low`` .. ``perplexity_high`` is a
    95% confidence interval, tokens taken as independent. ``kl`` and ``kl_p99`` are mean and 99th percentile
    of KL(reference || scheme) in nats; ``top1_percent`` is the share of tokens whose most likely continuation
    is the reference's. ``bits_per_value`` is what a sealed page of this model stores, scales included, and
    ``bits_per_value_d128`` what it would at head_dim 128. Of ``keys`` read by the scored rows,
    ``quantized_keys`` were codes.
    """

    kv: str
    scheme: str
    perplexity: float
    perplexity_low: float
    perplexity_high: float
    stderr: float
    delta_percent: float
    delta_stderr: float
    kl: float
    kl_stderr: float
    kl_p99: float
    top1_percent: float
    bits_per_value: float
    bits_per_value_d128: float
    scored_tokens: int
    window: int
    stride: int
    chunk: int
    quantized_keys: int
    keys: int

    @property
    def attends(self) -> str:
        """What the scored rows read, in words."""
        return f"attends to quantized pages: {self.quantized_keys} of {self.keys} keys"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description."""
        return {**asdict(self), "attends": self.attends}


def windows(num_tokens: int, window: int, stride: int) -> Iterator[Window]:
    """Cut a text: a window every ``stride`` tokens; a token is scored once, in the first window it can be.

    Raises
    ------
    ConfigError
        If the sizes make no sense, or the text has fewer than two tokens.
    """
    check_sizes(window, stride)
    if num_tokens < 2:
        raise ConfigError(f"{num_tokens} tokens of text are too few: perplexity needs at least 2")
    scored = 0
    for begin in range(0, num_tokens - 1, stride):
        end = min(begin + window, num_tokens)
        first = max(begin + 1, scored)
        if first < end:
            yield Window(begin, end, first)
        scored = end
        if end == num_tokens:
            return


def check_sizes(window: int, stride: int, chunk: int = 1) -> None:
    """Refuse sizes that make no sense with a ConfigError."""
    if not 1 <= stride <= window or window < 2:
        raise ConfigError(f"--window {window} and --stride {stride}: need 1 <= stride <= window, window >= 2")
    check_positive(chunk=chunk)


def score(
    models: Sequence[Prefiller],
    tokens: np.ndarray,
    *,
    window: int,
    stride: int,
    chunk: int,
    progress: Progress | None = None,
) -> list[Scores]:
    """Score a text under several models; the first is the reference of the others.

    Parameters
    ----------
    models : sequence of Prefiller
        The same weights with different caches.
    tokens : numpy.ndarray
        int32 ``[n]``.
    window, stride, chunk : int
        In tokens; ``chunk`` is the prefill chunk, which bounds the logits held at once.
    progress : callable, optional
        Called with the tokens that every model has read, and with how many there are to read.

    Returns
    -------
    list of Scores
        One a model.
    """
    scores = [Scores() for _ in models]
    parts = list(windows(len(tokens), window, stride))
    done, total = 0, sum(part.end - 1 - part.begin for part in parts)
    for part in parts:
        for model in models:
            model.reset()
        # The last token is only predicted, never read.
        for start in range(part.begin, part.end - 1, chunk):
            stop = min(start + chunk, part.end - 1)
            rows = np.arange(max(start, part.first - 1), stop, dtype=np.int32)
            _score_chunk(models, scores, tokens, start, stop, rows, part.begin)
            done += stop - start
            if progress is not None:
                progress(done, total)
    return scores


def _score_chunk(
    models: Sequence[Prefiller],
    scores: list[Scores],
    tokens: np.ndarray,
    start: int,
    stop: int,
    rows: np.ndarray,
    begin: int,
) -> None:
    """Feed ``tokens[start:stop]`` to every model and score the tokens that follow ``rows``."""
    reference: Distributions | None = None
    for model, result in zip(models, scores, strict=True):
        # A chunk of which no row is scored still has to fill the cache; it asks for its last row.
        wanted = rows - start if len(rows) else np.array([stop - start - 1], np.int32)
        logits = model.prefill(tokens[start:stop], wanted)
        if not len(rows):
            continue
        found = Distributions.of(logits, probabilities=reference is None)
        if reference is None:
            reference = found
        result.add(found, tokens[rows + 1], reference)
        positions = rows.astype(np.int64) - begin
        result.keys += int((positions + 1).sum())
        result.quantized_keys += int(model.quantized_keys(positions).sum())


def rows_of(
    names: Sequence[str],
    models: Sequence[Prefiller],
    scores: Sequence[Scores],
    *,
    window: int,
    stride: int,
    chunk: int,
) -> list[Row]:
    """The table of results; the first scheme is the reference."""
    return [
        Row(
            kv=name,
            scheme=model.description,
            perplexity=result.perplexity,
            perplexity_low=result.interval[0],
            perplexity_high=result.interval[1],
            stderr=result.stderr,
            delta_percent=result.delta_percent(scores[0]),
            delta_stderr=result.delta_stderr(scores[0]),
            kl=float(np.mean(result.kl)),
            kl_stderr=standard_error(result.kl),
            kl_p99=float(np.percentile(result.kl, 99)),
            top1_percent=100.0 * result.agree / len(result.nll),
            bits_per_value=model.bits_per_value(model.layout.head_dim),
            bits_per_value_d128=model.bits_per_value(COMMON_HEAD_DIM),
            scored_tokens=len(result.nll),
            window=window,
            stride=stride,
            chunk=chunk,
            quantized_keys=result.quantized_keys,
            keys=result.keys,
        )
        for name, model, result in zip(names, models, scores, strict=True)
    ]
