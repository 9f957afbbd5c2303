"""Perplexity of a text under several cache schemes, token by token against the unquantized cache.

The text is cut into windows; each is prefilled in chunks into an empty sequence, exactly as a prompt is
served, and every token but the first of a window is scored by the row before it (teacher forcing). A row
attends to what the cache holds: sealed, hence quantized, pages up to its own page. All schemes see the
same chunk before the next one starts, so the logits of one chunk are all that is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np

from kvq.errors import ConfigError
from kvq.eval.metrics import Scores, log_softmax
from kvq.layout import KVLayout

#: Name of the scheme that the others are compared with.
REFERENCE = "none"

#: Called with (done, total).
Progress = Callable[[int, int], None]


class Prefiller(Protocol):
    """One compiled model with one sequence, as the evaluation drives it."""

    @property
    def layout(self) -> KVLayout:
        """The layout of its cache."""

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

    ``stderr`` and ``delta_stderr`` are standard errors of ``perplexity`` and of ``delta_percent``; ``kl`` and
    ``kl_p99`` are mean and 99th percentile of KL(none || scheme) in nats; ``top1_percent`` is the share
    of tokens whose most likely continuation is the same; ``bits_per_value`` is what a sealed page
    stores, scales included; of ``keys`` read by the scored rows, ``quantized_keys`` were codes.
    """

    kv: str
    perplexity: float
    delta_percent: float
    stderr: float
    delta_stderr: float
    kl: float
    kl_p99: float
    top1_percent: float
    bits_per_value: float
    scored_tokens: int
    window: int
    stride: int
    chunk: int
    quantized_keys: int
    keys: int

    def to_dict(self) -> dict[str, float | int | str]:
        """A JSON-ready description."""
        return asdict(self)


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
    if chunk < 1:
        raise ConfigError(f"--chunk {chunk} makes no sense: it must be at least 1")


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
    reference: np.ndarray | None = None
    for model, result in zip(models, scores, strict=True):
        # A chunk of which no row is scored still has to fill the cache; it asks for its last row.
        wanted = rows - start if len(rows) else np.array([stop - start - 1], np.int32)
        logits = model.prefill(tokens[start:stop], wanted)
        if not len(rows):
            continue
        log_probs = log_softmax(logits)
        if reference is None:
            reference = log_probs
        result.add(log_probs, tokens[rows + 1], reference)
        positions = rows.astype(np.int64) - begin
        result.keys += int((positions + 1).sum())
        if model.layout.k_bits or model.layout.v_bits:
            page = model.layout.page_size
            result.quantized_keys += int((positions // page * page).sum())


def rows_of(
    names: Sequence[str],
    layouts: Sequence[KVLayout],
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
            perplexity=result.perplexity,
            delta_percent=result.delta_percent(scores[0]),
            stderr=result.stderr,
            delta_stderr=result.delta_stderr(scores[0]),
            kl=float(np.mean(result.kl)),
            kl_p99=float(np.percentile(result.kl, 99)),
            top1_percent=100.0 * result.agree / len(result.nll),
            bits_per_value=layout.bits_per_value,
            scored_tokens=len(result.nll),
            window=window,
            stride=stride,
            chunk=chunk,
            quantized_keys=result.quantized_keys,
            keys=result.keys,
        )
        for name, layout, result in zip(names, layouts, scores, strict=True)
    ]
