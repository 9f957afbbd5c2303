"""Generation of one answer: prefill in chunks, decode, stop; keeps the cache warm for the next turn.

The core owns one sequence. A new prompt keeps what it shares with the last one and runs the rest.
Many requests at once need a scheduler in this place; what is around it stays.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kvq.engine.protocol import FinishReason
from kvq.engine.stop import StopMatcher
from kvq.errors import CacheError, ConfigError
from kvq.runtime.kv_cache import PagedKVCache, SequenceId
from kvq.runtime.sampler import SampledToken, Sampler, SamplingParams

logger = logging.getLogger("kvq")
_SEQUENCE = "session"


class StepModel(Protocol):
    """What the core needs of a model; :class:`kvq.runtime.loaded_model.LoadedModel` has it."""

    cache: PagedKVCache
    faults: np.ndarray

    def step(
        self, requests: list[tuple[SequenceId, int]], ids: Any, logit_rows: list[int] | None = None
    ) -> np.ndarray:
        """Append tokens; float32 logits ``[rows, V]``, of the last row of each sequence by default."""


class Detokenizer(Protocol):
    """Ids to text one by one."""

    def put(self, index: int) -> str:
        """The text that is certain after this id."""

    def flush(self) -> str:
        """The rest."""


@dataclass(frozen=True)
class Request:
    """One answer to generate.

    Attributes
    ----------
    prompt : list of int
        Token ids.
    sampling : SamplingParams
    max_tokens : int or None
        None: until the context is full.
    stop_ids, stop_strings
        Where the answer ends; neither is part of it.
    choice : int
        Index among the answers to one prompt.
    """

    prompt: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    choice: int = 0


@dataclass(frozen=True)
class Piece:
    """What a step brought: a token, the text that may be shown, and whether it was the last."""

    token: SampledToken | None
    text: str
    finish_reason: FinishReason | None = None


@dataclass
class Stats:
    """What requests cost; seconds are of wall time.

    Attributes
    ----------
    prompt_tokens, cached_tokens, completion_tokens : int
        Of the prompt, of it found in the cache, and drawn.
    prefill_tokens, decode_tokens : int
        Rows that were run.
    faults : tuple of int
        NaNs replaced and values saturated while K and V were stored.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    faults: tuple[int, int] = (0, 0)

    @property
    def prefill_rate(self) -> float:
        """Tokens per second of prefill."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second of decode."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


class EngineCore:
    """Runs one request at a time.

    Parameters
    ----------
    model : StepModel
    context_window_size, prefill_chunk_size : int
        Most tokens of a sequence, and of a prefill step.
    vocab_size : int
        Ids that may be drawn.
    """

    def __init__(
        self, model: StepModel, *, context_window_size: int, prefill_chunk_size: int, vocab_size: int
    ) -> None:
        self.model = model
        self.context_window_size = context_window_size
        self.prefill_chunk_size = prefill_chunk_size
        self.vocab_size = vocab_size
        self.stats = Stats()
        self._tokens: list[int] = []
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._warned = False

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Refuse a prompt that leaves no room for an answer.

        Raises
        ------
        ConfigError
            If it is empty, too long, or holds an unknown id.
        """
        if not prompt:
            raise ConfigError("the prompt is empty: it needs at least one token")
        if len(prompt) >= self.context_window_size:
            raise ConfigError(
                f"the prompt has {len(prompt)} tokens and the context window {self.context_window_size}: "
                "shorten it, or raise --context-window-size"
            )
        if not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            raise ConfigError(f"the prompt holds a token id outside 0 .. {self.vocab_size - 1}")

    def reset(self) -> None:
        """Forget the conversation; its pages are free again."""
        if _SEQUENCE in self.model.cache:
            self.model.cache.remove_sequence(_SEQUENCE)
        self._tokens = []

    def generate(self, request: Request, detokenizer: Detokenizer) -> Iterator[Piece]:
        """Generate an answer piece by piece; the last piece has a finish reason.

        Closing the iterator stops the answer and leaves the cache in order.
        """
        self.check_prompt(request.prompt)
        self._acquire()
        stats = self.stats = Stats(prompt_tokens=len(request.prompt))
        faults = self.model.faults.copy()
        try:
            yield from self._generate(request, detokenizer, stats)
        except GeneratorExit:
            raise
        except BaseException:
            # A step that broke off may have left half of its rows behind.
            self.reset()
            raise
        finally:
            nans, saturated = (int(n) for n in self.model.faults - faults)
            stats.faults = (nans, saturated)
            self._warn_of_faults(nans, saturated)
            self._release()

    def _generate(self, request: Request, detokenizer: Detokenizer, stats: Stats) -> Iterator[Piece]:
        sampler = Sampler(request.sampling, request.prompt, self.vocab_size, request.choice)
        stop = StopMatcher(request.stop_strings)
        room = self.context_window_size - len(request.prompt)
        limit = room if request.max_tokens is None else min(room, request.max_tokens)
        logits = self._prefill(request.prompt, stats)
        while True:
            token = sampler.sample(logits, len(self._tokens))
            stats.completion_tokens += 1
            if token.id in request.stop_ids:
                text = stop.put(detokenizer.flush())
                yield Piece(token, text + stop.flush(), "stop")
                return
            text = stop.put(detokenizer.put(token.id))
            if stop.stopped:
                yield Piece(token, text, "stop")
                return
            if stats.completion_tokens >= limit:
                text += stop.put(detokenizer.flush())
                yield Piece(token, text + stop.flush(), "stop" if stop.stopped else "length")
                return
            yield Piece(token, text)
            started = time.perf_counter()
            logits = self._step([token.id])
            stats.decode_tokens += 1
            stats.decode_seconds += time.perf_counter() - started

    def _prefill(self, prompt: list[int], stats: Stats) -> np.ndarray:
        """Bring the sequence to ``prompt``, reusing the tokens it shares; logits after its last token."""
        started = time.perf_counter()
        cache = self.model.cache
        if _SEQUENCE not in cache:
            cache.add_sequence(_SEQUENCE)
            self._tokens = []
        shared = _common_prefix(self._tokens, prompt)
        keep = min(shared, len(prompt) - 1)  # the last token is run again for its logits
        recompute = cache.popn(_SEQUENCE, len(self._tokens) - keep)
        del self._tokens[keep - recompute :]
        stats.cached_tokens = len(self._tokens)
        stats.prefill_tokens = len(prompt) - len(self._tokens)
        while len(self._tokens) < len(prompt):
            start = len(self._tokens)
            logits = self._step(prompt[start : start + self.prefill_chunk_size])
        stats.prefill_seconds = time.perf_counter() - started
        return logits

    def _step(self, ids: list[int]) -> np.ndarray:
        logits = self.model.step([(_SEQUENCE, len(ids))], ids)[0]
        self._tokens.extend(ids)
        return logits

    def _acquire(self) -> None:
        if self._owner == threading.get_ident():
            raise CacheError("an answer is still being streamed: finish or close it before the next request")
        self._lock.acquire()
        self._owner = threading.get_ident()

    def _release(self) -> None:
        self._owner = None
        self._lock.release()

    def _warn_of_faults(self, nans: int, saturated: int) -> None:
        if (nans or saturated) and not self._warned:
            self._warned = True
            logger.warning(
                "the KV cache replaced %d NaNs and saturated %d values beyond the fp16 range", nans, saturated
            )


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    length = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:length]) != np.asarray(b[:length]))
    return int(differ[0]) if len(differ) else length
