"""What goes into the engine and what comes out: requests, pieces of answers, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np

from kvq.runtime.sampler import SampledToken, SamplingParams

#: ``stop`` and ``length`` as in OpenAI's API; ``error``: the engine had to end the answer;
#: ``abort``: it was cancelled from outside, by a shutdown for example.
FinishReason = Literal["stop", "length", "error", "abort"]


class TokenConstraint(Protocol):
    """Says which tokens may come next: a grammar, a schema. One object serves one request."""

    @property
    def stopped(self) -> bool:
        """Whether nothing may follow: the answer ends with ``stop``."""

    def allowed(self) -> np.ndarray | None:
        """Tokens that may come next, bool ``[>= vocabulary]``; None if all may. Does not modify."""

    def advance(self, token: int) -> None:
        """A token was drawn."""


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
        None: until the context or the pool is full.
    stop_ids, stop_strings
        Where the answer ends; neither is part of it.
    choice : int
        Index among the answers to one prompt; decides the draws together with the seed.
    constraint : TokenConstraint or None
        Narrows the tokens that may be drawn. It has a state, so every request needs one of its own.
    """

    prompt: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    choice: int = 0
    constraint: TokenConstraint | None = None


@dataclass
class RequestStats:
    """What a request cost; seconds are of wall time.

    Attributes
    ----------
    prompt_tokens, cached_tokens, completion_tokens : int
        Of the prompt, of it found in the prefix cache, and drawn.
    prefill_tokens, decode_tokens : int
        Rows that were run, those of a preempted answer that had to be run again among them.
    prefill_seconds, decode_seconds : float
        Time of the steps that ran them; requests that share a step each count all of it.
    queue_seconds, first_token_seconds : float
        From the request's arrival until it first ran, and until its first token was drawn.
    preemptions : int
        How often it had to give its pages back.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    preemptions: int = 0

    @property
    def prefill_rate(self) -> float:
        """Tokens per second of prefill."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second of decode."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


class Piece(NamedTuple):
    """What a step brought for a request.

    Attributes
    ----------
    token : SampledToken or None
        The token drawn; None in a piece that only ends an answer.
    text : str
        Text that may be shown now.
    finish_reason : str or None
        Set in the last piece of an answer.
    error : str or None
        One line, with the finish reason ``error``.
    stats : RequestStats or None
        What the answer cost, in its last piece.
    """

    token: SampledToken | None
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: RequestStats | None = None


@dataclass(frozen=True)
class EngineStats:
    """The engine at one moment, and its totals since it started.

    Attributes
    ----------
    running, waiting : int
        Requests in the batch, and in the queue.
    total_pages, used_pages, peak_pages, cached_pages : int
        Sealed pages of the pool; those that running requests hold, and the most they have held at once;
        those that only the prefix cache holds, which are given up when they are needed.
    max_running : int
        Most requests in the batch.
    requests, finished, cancelled, failed : int
        Requests taken, and how they ended.
    prompt_tokens, hit_tokens, generated_tokens : int
        Tokens of the prompts that have started, of them found in the prefix cache, and drawn.
    prefill_rows, decode_rows, steps : int
        What was run for it.
    preemptions, evicted_pages : int
        Requests that had to give back their pages, and pages that the prefix cache gave up.
    faults : tuple of int
        NaNs replaced and values saturated while K and V were stored.
    """

    running: int
    waiting: int
    total_pages: int
    used_pages: int
    peak_pages: int
    cached_pages: int
    max_running: int
    requests: int
    finished: int
    cancelled: int
    failed: int
    prompt_tokens: int
    hit_tokens: int
    generated_tokens: int
    prefill_rows: int
    decode_rows: int
    steps: int
    preemptions: int
    evicted_pages: int
    faults: tuple[int, int]
