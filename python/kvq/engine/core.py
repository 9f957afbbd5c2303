"""The stepper: requests in, a step of the model at a time, pieces of their answers out.

It belongs to one thread. :class:`kvq.engine.driver.Driver` shares it among threads that wait for their
answers, :class:`kvq.engine.async_engine.AsyncEngine` runs it in a thread of its own.
"""

from __future__ import annotations

import itertools
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from kvq.engine.request import Detokenizer, EngineStats, Piece, Request, RequestStats
from kvq.engine.request_state import RequestState
from kvq.engine.scheduler import Job, Scheduler
from kvq.errors import ConfigError
from kvq.runtime.kv_cache import PagedKVCache, SequenceId
from kvq.runtime.prefix_cache import PrefixCache
from kvq.runtime.sampler import DRAW_FIELDS, SamplingParams, check_bias

logger = logging.getLogger("kvq")

#: A request's id and what a step brought for it.
Output = tuple[int, Piece]


class StepModel(Protocol):
    """What the core needs of a model; :class:`kvq.runtime.loaded_model.LoadedModel` has it."""

    cache: PagedKVCache
    faults: np.ndarray

    def can_draw(self, params: SamplingParams) -> bool:
        """Whether :meth:`draw` draws such tokens."""
        ...

    def step(
        self,
        requests: list[tuple[SequenceId, int]],
        ids: Any,
        logit_rows: list[int] | None = None,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> np.ndarray:
        """Append tokens; float32 logits ``[rows, V]``, of the last row of each sequence by default.

        ``meanwhile`` is called once, when the device has its work.
        """
        ...

    def draw(
        self,
        requests: list[tuple[SequenceId, int]],
        ids: Any,
        draws: np.ndarray,
        logit_rows: list[int] | None = None,
        hosted: Sequence[int] = (),
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Append tokens; int32 tokens ``[rows]``, -1 where a logit is not finite; logits of ``hosted``."""
        ...


class EngineCore:
    """Runs many requests at once.

    Parameters
    ----------
    model : StepModel
        The core owns its cache.
    new_stream : callable
        Makes the detokenizer of an state.
    context_window_size, prefill_chunk_size : int
        Most tokens of a sequence, and rows of a step (or the open pages, where these are more).
    vocab_size : int
        Ids that may be drawn.
    prefix_cache : bool
        Whether pages of earlier prompts and answers serve later ones.
    """

    def __init__(
        self,
        model: StepModel,
        new_stream: Callable[[], Detokenizer],
        *,
        context_window_size: int,
        prefill_chunk_size: int,
        vocab_size: int,
        prefix_cache: bool = True,
    ) -> None:
        self.model = model
        self.context_window_size = context_window_size
        self.vocab_size = vocab_size
        cache = model.cache
        releases = cache.window is not None
        self.prefix = PrefixCache(cache.pool, cache.page_size, releases) if prefix_cache else None
        rows = max(prefill_chunk_size, cache.open_pages.num_open)
        self.scheduler = Scheduler(cache, rows, self.prefix)
        self.last_request = RequestStats()
        self._new_stream = new_stream
        self._draws = model.can_draw(SamplingParams(temperature=0))
        self._states: dict[int, RequestState] = {}
        self._ids = itertools.count()
        self._finished = self._cancelled = self._failed = 0
        self._prompt_tokens = self._hit_tokens = self._generated = 0
        self._prefill_rows = self._decode_rows = self._steps = 0
        self._warned = False

    # ---- requests ------------------------------------------------------------------------------
    def check(self, request: Request) -> None:
        """Refuse what can never run. Does not modify anything; any thread may call it.

        Raises
        ------
        ConfigError
            If the prompt is empty, too long, or holds an unknown id, if it and ``max_tokens`` exceed the
            pool, or if a bias is for an unknown id.
        """
        prompt = request.prompt
        if not prompt:
            raise ConfigError("the prompt is empty: it needs at least one token")
        if len(prompt) >= self.context_window_size:
            raise ConfigError(
                f"the prompt has {len(prompt)} tokens and the context window {self.context_window_size}: "
                "shorten it, or raise --context-window-size"
            )
        if not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            raise ConfigError(f"the prompt holds a token id outside 0 .. {self.vocab_size - 1}")
        check_bias(request.sampling, self.vocab_size)
        most = self._most_tokens()
        if len(prompt) + min(request.max_tokens or 1, self.context_window_size - len(prompt)) > most:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens and max_tokens {request.max_tokens or 1} exceed the "
                f"{most} tokens that the KV cache holds: lower one of them, or raise --memory"
            )

    def add(self, request: Request) -> int:
        """Queue a request; returns its id.

        Raises
        ------
        ConfigError
            As of :meth:`check`.
        """
        self.check(request)
        room = min(self.context_window_size, self._most_tokens()) - len(request.prompt)
        limit = room if request.max_tokens is None else min(room, request.max_tokens)
        index = next(self._ids)
        job = Job(index, array("i", request.prompt))
        state = RequestState(request, job, limit, self._new_stream(), self.vocab_size)
        state.on_device = request.constraint is None and self.model.can_draw(request.sampling)
        self._states[index] = state
        self.scheduler.add(job)
        return index

    def cancel(self, index: int) -> None:
        """End a request without a further piece; its pages are free at once. Unknown ids are ignored."""
        state = self._states.get(index)
        if state is not None:
            self._cancelled += 1
            self._end(state)

    def abort_all(self, reason: str) -> list[Output]:
        """End every request with a piece ``abort`` that says why; returns the pieces."""
        self._cancelled += len(self._states)
        return [self._close(state, "abort", reason) for state in list(self._states.values())]

    def reset(self) -> None:
        """Empty the prefix cache; requests that run keep their pages."""
        if self.prefix is not None:
            self.prefix.clear()

    def __contains__(self, index: int) -> bool:
        return index in self._states

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has something to do."""
        return bool(self._states)

    # ---- steps ---------------------------------------------------------------------------------
    def step(self, meanwhile: Callable[[], None] | None = None) -> list[Output]:
        """Run one step; pieces of the answers that it brought on. Empty if there is nothing to do.

        An exception of the model ends the requests of this step with an error; all others go on.

        Parameters
        ----------
        meanwhile : callable, optional
            Called once when the device has its work, if the step gets that far; must not touch the core.
        """
        outputs: list[Output] = []
        try:
            self._step(outputs, meanwhile)
        except Exception as error:
            logger.exception("the engine failed")
            # The engine itself is at fault: nothing that it knows can be relied on.
            self._failed += len(self._states)
            outputs += [self._ending(state, "error", _one_line(error)) for state in self._states.values()]
            self._states.clear()
            self.scheduler.clear()
        return outputs

    def _step(self, outputs: list[Output], meanwhile: Callable[[], None] | None) -> None:
        shares = self.scheduler.schedule()
        if not shares:
            return
        started = time.perf_counter()
        batch = [self._states[job.id] for job, _ in shares]
        for state in batch:
            if state.starts(started):
                self._prompt_tokens += state.stats.prompt_tokens
                self._hit_tokens += state.stats.cached_tokens
        try:
            drawn, tokens, logits = self._run(batch, shares, meanwhile)
        except Exception as error:
            logger.exception("a step of %d requests failed", len(batch))
            outputs += [self._fail(state, _one_line(error)) for state in batch]
            return
        except BaseException:
            for state in batch:
                self._end(state, keep=False)
            raise
        self.scheduler.ran(shares)
        elapsed = time.perf_counter() - started
        for state, (_, count) in zip(batch, shares, strict=True):
            state.count(count, elapsed)
        self._count(batch, shares)
        self._draw([batch[i] for i in drawn], tokens, logits, outputs)

    def _run(
        self,
        batch: list[RequestState],
        shares: list[tuple[Job, int]],
        meanwhile: Callable[[], None] | None,
    ) -> tuple[list[int], np.ndarray, list[np.ndarray | None]]:
        """Run the model; which shares end in a token to draw, the tokens, logits where they are needed."""
        length = self.model.cache.length
        requests: list[tuple[SequenceId, int]] = []
        ids: list[int] = []
        drawn: list[int] = []
        rows: list[int] = []
        for index, (job, count) in enumerate(shares):
            start, tokens_of = length(job.id), job.tokens
            if count == 1:
                ids.append(tokens_of[start])
            else:
                ids.extend(tokens_of[start : start + count])
            requests.append((job.id, count))
            if start + count == len(tokens_of):
                drawn.append(index)
                rows.append(len(ids) - 1)
        # A kernel wants at least one row; that of a prompt that goes on is then of no use.
        wanted = None if len(drawn) == len(shares) else rows or [len(ids) - 1]
        states = [batch[i] for i in drawn]
        on_device = [state.on_device for state in states]
        if any(on_device) or (self._draws and not drawn):
            hosted = [
                row for row, state in enumerate(states) if state.reports_logprobs or not state.on_device
            ]
            draws = np.zeros((len(states), DRAW_FIELDS), np.int32)
            for row, state in enumerate(states):
                if state.on_device:
                    draws[row] = state.device_draw()
            tokens, some = self.model.draw(requests, ids, draws, wanted, hosted, meanwhile=meanwhile)
            logits: list[np.ndarray | None] = [None] * len(states)
            for row, values in zip(hosted, some, strict=True):
                logits[row] = values[: self.vocab_size]
            return drawn, tokens, logits
        every = self.model.step(requests, ids, wanted, meanwhile=meanwhile)[: len(drawn), : self.vocab_size]
        return drawn, np.where(_all_finite(every), every.argmax(axis=1), -1), list(every)

    def _draw(
        self,
        states: list[RequestState],
        tokens: np.ndarray,
        logits: list[np.ndarray | None],
        outputs: list[Output],
    ) -> None:
        """Draw a token for each answer; the likeliest or, without logits, the drawn one is known."""
        now = time.perf_counter()
        for state, token, values in zip(states, tokens.tolist(), logits, strict=False):
            if token < 0:
                outputs.append(self._fail(state, "the model's logits are not finite"))
                continue
            try:
                piece = state.draw(values, token, now)
            except Exception as error:
                logger.exception("drawing a token failed")
                outputs.append(self._fail(state, _one_line(error)))
                continue
            self._generated += 1
            if piece.finish_reason is not None:
                self._finished += 1
                self.last_request = state.stats
                self._end(state)
            outputs.append((state.job.id, piece))

    def _fail(self, state: RequestState, error: str) -> Output:
        self._failed += 1
        return self._close(state, "error", error, keep=False)

    def _close(self, state: RequestState, reason: Any, message: str, keep: bool = True) -> Output:
        self._end(state, keep)
        return self._ending(state, reason, message)

    @staticmethod
    def _ending(state: RequestState, reason: Any, message: str) -> Output:
        return state.job.id, Piece(None, "", reason, message, state.stats)

    def _end(self, state: RequestState, keep: bool = True) -> None:
        del self._states[state.job.id]
        self.scheduler.remove(state.job, keep)

    # ---- figures -------------------------------------------------------------------------------
    def stats(self) -> EngineStats:
        """The engine at this moment. Does not modify anything; any thread may call it."""
        cache, scheduler = self.model.cache, self.scheduler
        pool = cache.pool
        nans, saturated = (int(n) for n in self.model.faults)
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            total_pages=pool.num_pages,
            used_pages=pool.num_pages - pool.num_available,
            peak_pages=pool.peak_used,
            cached_pages=pool.num_idle,
            max_running=cache.open_pages.num_open,
            requests=self._finished + self._cancelled + self._failed + len(self._states),
            finished=self._finished,
            cancelled=self._cancelled,
            failed=self._failed,
            prompt_tokens=self._prompt_tokens,
            hit_tokens=self._hit_tokens,
            generated_tokens=self._generated,
            prefill_rows=self._prefill_rows,
            decode_rows=self._decode_rows,
            steps=self._steps,
            preemptions=scheduler.preemptions,
            evicted_pages=self.prefix.evicted if self.prefix is not None else 0,
            faults=(nans, saturated),
        )

    def _count(self, batch: list[RequestState], shares: list[tuple[Job, int]]) -> None:
        decoded = sum(state.decodes for state in batch)
        self._decode_rows += decoded
        self._prefill_rows += sum(count for _, count in shares) - decoded
        self._steps += 1
        nans, saturated = (int(n) for n in self.model.faults)
        if (nans or saturated) and not self._warned:
            self._warned = True
            logger.warning(
                "the KV cache replaced %d NaNs and saturated %d values beyond the fp16 range", nans, saturated
            )

    def _most_tokens(self) -> int:
        """Most tokens of a sequence that has the pool for itself; the last one drawn need not run."""
        longest = self.model.cache.longest_sequence
        return self.context_window_size if longest is None else longest + self.model.cache.page_size

    def check_integrity(self) -> None:
        """Compare requests, jobs, sequences and pages; raises CacheError. Does not modify anything."""
        self.scheduler.check_integrity()
        jobs = {job.id for job in [*self.scheduler.running, *self.scheduler.waiting]}
        assert jobs == set(self._states), "every request has a job"


def _all_finite(logits: np.ndarray) -> np.ndarray:
    """Which rows are finite throughout."""
    # A sum of finite numbers is finite, overflow apart, and costs a fraction of asking each of them.
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(logits.sum(axis=1))
    return finite if finite.all() else np.isfinite(logits).all(axis=1)


def _one_line(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[-1]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
