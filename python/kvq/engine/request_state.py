"""A request while it runs: draws, text, stop conditions, and what it cost."""

from __future__ import annotations

import time

import numpy as np

from kvq.engine.request import Detokenizer, FinishReason, Piece, Request, RequestStats
from kvq.engine.scheduler import Job
from kvq.engine.stop import StopMatcher
from kvq.runtime.sampler import SampledToken, Sampler


class RequestState:
    """The state of a request.

    Parameters
    ----------
    request : Request
    job : Job
        The scheduler's part; drawn tokens are appended to its tokens.
    limit : int
        Most tokens to draw.
    detokenizer : Detokenizer
    vocab_size : int
        Ids that may be drawn.
    """

    def __init__(
        self, request: Request, job: Job, limit: int, detokenizer: Detokenizer, vocab_size: int
    ) -> None:
        self.request, self.job, self.limit = request, job, limit
        self.stats = RequestStats(prompt_tokens=len(request.prompt))
        self._detokenizer = detokenizer
        self._stop = StopMatcher(request.stop_strings)
        self._sampler = Sampler(request.sampling, request.prompt, vocab_size, request.choice)
        sampling = request.sampling
        self._takes_likeliest = (
            sampling.is_greedy and not sampling.changes_logits and request.constraint is None
        )
        #: Whether the device draws the tokens, and whether their logits are wanted all the same.
        self.on_device = False
        self.reports_logprobs = sampling.top_logprobs is not None
        self._arrived = time.perf_counter()
        self._started = False
        #: Whether the rows of the current step append a drawn token, rather than tokens known before.
        self.decodes = False

    def starts(self, now: float) -> bool:
        """A step with rows of this answer begins; whether it is the first."""
        if self._started:
            return False
        self._started = True
        self.stats.queue_seconds = now - self._arrived
        self.stats.cached_tokens = self.job.hit_tokens
        return True

    def count(self, rows: int, seconds: float) -> None:
        """A step has run so many rows of this answer."""
        stats = self.stats
        stats.preemptions = self.job.preemptions
        self.decodes = rows == 1 and stats.completion_tokens > 0
        if self.decodes:
            stats.decode_tokens += 1
            stats.decode_seconds += seconds
        else:
            stats.prefill_tokens += rows
            stats.prefill_seconds += seconds

    def device_draw(self) -> np.ndarray:
        """How the device draws the next token, int32 ``[DRAW_FIELDS]``."""
        return self._sampler.device_draw(len(self.job.tokens))

    def draw(self, logits: np.ndarray | None, token_id: int, now: float) -> Piece:
        """Draw the next token.

        Parameters
        ----------
        logits : numpy.ndarray or None
            float32 ``[V]``; None where the device drew and nothing is to be told of them.
        token_id : int
            What it drew; else the index of the largest logit.
        """
        token = self._next_token(logits, token_id)
        stats = self.stats
        if not stats.completion_tokens:
            stats.first_token_seconds = now - self._arrived
        stats.completion_tokens += 1
        stop = self._stop
        if token.id in self.request.stop_ids:
            return self._last(token, stop.put(self._detokenizer.flush()) + stop.flush(), "stop")
        text = stop.put(self._detokenizer.put(token.id))
        if stop.stopped:
            return self._last(token, text, "stop")
        constraint = self.request.constraint
        finished = constraint is not None and constraint.stopped
        if finished or stats.completion_tokens >= self.limit:
            text += stop.put(self._detokenizer.flush())
            reason: FinishReason = "stop" if finished or stop.stopped else "length"
            return self._last(token, text + stop.flush(), reason)
        self.job.tokens.append(token.id)
        return Piece(token, text)

    def _next_token(self, logits: np.ndarray | None, token_id: int) -> SampledToken:
        if self.on_device or self._takes_likeliest:
            return self._sampler.report(token_id, logits)
        assert logits is not None
        constraint = self.request.constraint
        allowed = None if constraint is None else constraint.allowed()
        if allowed is not None and not allowed[: len(logits)].any():
            raise ValueError("the grammar allows no further token")
        token = self._sampler.sample(logits, len(self.job.tokens), allowed)
        if constraint is not None:
            constraint.advance(token.id)
        return token

    def _last(self, token: SampledToken, text: str, reason: FinishReason) -> Piece:
        return Piece(token, text, reason, stats=self.stats)
