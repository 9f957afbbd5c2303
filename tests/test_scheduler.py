"""The scheduler under pressure: a state machine over a fake model whose answers depend on all it is shown."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fake_model import FakeModel, fake_core
from kvq.engine.request import Piece, Request
from kvq.engine.scheduler import Job, Scheduler
from kvq.errors import ConfigError
from kvq.layout import KVLayout
from kvq.runtime.kv_cache import PagedKVCache
from kvq.runtime.prefix_cache import PrefixCache
from kvq.runtime.sampler import SamplingParams

P = 32
GREEDY = SamplingParams(temperature=0)


# ---- steps one by one: numbers only -------------------------------------------------------------
class Rig:
    """A scheduler without a model: steps commit at once, and every finished prompt draws token 7."""

    def __init__(
        self,
        pages: int = 20,
        num_open: int = 4,
        rows: int = 64,
        prefix: bool = True,
        window: int | None = None,
    ) -> None:
        self.cache = PagedKVCache(KVLayout(1, 2, 64, page_size=P), pages, num_open, 3, window=window)
        tree = PrefixCache(self.cache.pool, P, window is not None) if prefix else None
        self.scheduler = Scheduler(self.cache, rows, tree)
        self.jobs = 0

    def add(self, length: int, first: int = 1) -> Job:
        job = Job(self.jobs, array("i", [first] * length))
        self.jobs += 1
        self.scheduler.add(job)
        return job

    def step(self) -> list[tuple[int, int]]:
        shares = self.scheduler.schedule()
        self.cache.begin_step([(job.id, count) for job, count in shares])
        self.cache.commit_step()
        self.scheduler.ran(shares)
        for job, _ in shares:
            if not self.scheduler.pending(job):
                job.tokens.append(7)
        self.scheduler.check_integrity()
        return [(job.id, count) for job, count in shares]


def test_prefills_fill_the_rows_that_decodes_leave() -> None:
    rig = Rig(rows=64)
    rig.add(10, 1)
    assert rig.step() == [(0, 10)]
    rig.add(100, 2)
    rig.add(30, 3)
    assert rig.step() == [(0, 1), (1, 63)]
    assert rig.step() == [(0, 1), (1, 37), (2, 26)]
    assert rig.step() == [(0, 1), (1, 1), (2, 4)]
    assert rig.step() == [(0, 1), (1, 1), (2, 1)]


def test_a_chunk_fits_the_workspace() -> None:
    rig = Rig(rows=64)
    rig.cache.num_workspace = 1
    rig.add(10, 1)
    rig.step()
    rig.add(200, 2)
    # An open page and one of workspace: up to the end of the second, or as many rows as there are.
    assert [rig.step()[1] for _ in range(4)] == [(1, 63), (1, 33), (1, 63), (1, 33)]
    assert rig.step()[1] == (1, 8)


def test_admission_keeps_a_page_for_everyone_who_runs() -> None:
    rig = Rig(pages=10, rows=400)
    rig.cache.num_workspace = 20
    rig.add(4 * P, 1)
    rig.step()
    rig.add(4 * P, 2)
    assert rig.step() == [(0, 1), (1, 4 * P)]  # 2 pages are left for 2 jobs
    rig.add(P, 3)
    assert rig.step() == [(0, 1), (1, 1)]
    rig.scheduler.remove(rig.scheduler.running[0])
    assert rig.step() == [(1, 1), (2, P)]


def test_the_latest_makes_room_and_comes_back() -> None:
    rig = Rig(pages=4, rows=200)
    rig.cache.num_workspace = 8
    a = rig.add(P + 20, 1)
    rig.step()
    b = rig.add(20, 2)
    rig.step()
    assert rig.scheduler.running == [a, b]
    while not rig.scheduler.preemptions:
        rig.step()
    # a holds three pages and needs the fourth, which b has just filled
    assert rig.scheduler.running == [a] and list(rig.scheduler.waiting) == [b] and b.preemptions == 1
    rig.scheduler.remove(a)
    pending = len(b.tokens)
    assert rig.step() == [(b.id, pending)]


def test_what_a_running_job_computes_is_waited_for() -> None:
    rig = Rig(rows=64)
    rig.add(90, 1)
    rig.add(90, 1)
    rig.add(10, 2)
    assert rig.step() == [(0, 64)]
    assert rig.step() == [(0, 26), (1, 26), (2, 10)]  # 64 tokens were found
    assert rig.scheduler.running[1].hit_tokens == 64
    alone = Rig(rows=64, prefix=False)
    alone.add(40, 1)
    alone.add(90, 1)
    assert alone.step() == [(0, 40), (1, 24)]


def test_a_page_that_two_jobs_computed_is_kept_once() -> None:
    rig = Rig(rows=33)
    a = rig.add(P + 8, 1)
    while len(a.tokens) < 5 * P + 3:
        rig.step()
    b = rig.add(0)
    b.tokens = array("i", [*a.tokens[: 5 * P], *[9] * (2 * P)])
    rig.step()
    rig.step()  # b has the first page from a's prompt and computes others that a has as well
    rig.scheduler.remove(a)
    assert rig.cache.pool.num_idle > 0
    while rig.scheduler.pending(b) > 1:
        rig.step()
    assert rig.cache.pool.num_idle == 0 and rig.cache.pool.num_free == 20 - 7


def test_pages_that_every_layer_has_left_behind_serve_others() -> None:
    """A window of 70 tokens lies in at most four pages, whatever a prompt and its answer are long."""
    rig = Rig(pages=8, rows=64, window=70)
    job, steps = rig.add(20 * P, 1), 0
    while len(job.tokens) < 30 * P:
        rig.step()
        steps += 1
        assert len(rig.cache.sequence(job.id).pages) <= 3
    assert rig.cache.pool.peak_used <= 3 + 2 and steps == 10 + 10 * P - 1


def test_a_prefix_whose_first_pages_are_idle_is_found_until_they_are_evicted() -> None:
    rig = Rig(pages=12, rows=64, window=70)
    a = rig.add(8 * P, 1)
    for _ in range(4):
        rig.step()
    assert rig.cache.sequence(a.id).first_page == 5 and rig.cache.pool.num_idle == 5
    b = rig.add(8 * P + 1, 1)
    rig.step()
    assert b.hit_tokens == 8 * P and rig.cache.sequence(b.id).first_page == 5
    assert rig.scheduler.prefix is not None
    rig.scheduler.prefix.evict(1)  # the last of the idle ones: what is behind it can no longer be found
    rig.scheduler.check_integrity()
    assert len(rig.scheduler.prefix.match(b.tokens)) == 4
    while len(b.tokens) < 11 * P:
        rig.step()
    assert len(rig.scheduler.prefix.match(b.tokens)) == 4
    rig.scheduler.clear()
    assert rig.cache.num_free_pages == 12


# ---- the state machine --------------------------------------------------------------------------
class EngineMachine(RuleBasedStateMachine):
    """Requests come, go and compete for a pool that holds few of them."""

    @initialize(
        pages=st.integers(3, 14),
        num_open=st.integers(1, 5),
        chunk=st.sampled_from([1, 7, 33, 64]),
        prefix=st.booleans(),
        window=st.sampled_from([None, None, 20, P, P + 1, 70]),
    )
    def build(self, pages: int, num_open: int, chunk: int, prefix: bool, window: int | None) -> None:
        self.model = FakeModel(300, chunk, num_open, pages, window)
        self.window = window
        self.core = fake_core(self.model, 300, chunk, prefix_cache=prefix)
        self.live: dict[int, Request] = {}
        self.drawn: dict[int, list[int]] = {}
        self.age: dict[int, int] = {}
        self.ahead: dict[int, int] = {}
        self.broken: set[int] = set()
        self.finished = 0

    @rule(
        shared=st.sampled_from([0, 20, 32, 64, 100, 150]),
        own=st.integers(0, 80),
        kind=st.integers(40, 44),
        tokens=st.integers(1, 60),
        temperature=st.sampled_from([0.0, 0.0, 1.0]),
    )
    def add(self, shared: int, own: int, kind: int, tokens: int, temperature: float) -> None:
        prompt = [35] * shared + [kind] * (own if shared or own else 1)
        sampling = SamplingParams(temperature=temperature, seed=kind)
        request = Request(prompt, sampling, max_tokens=tokens)
        endless = self.window is not None and (self.window + P - 2) // P < self.model.cache.pool.num_pages
        if (len(prompt) + tokens - 1) // P > self.model.cache.pool.num_pages and not endless:
            with pytest.raises(ConfigError, match=r"exceed the \d+ tokens that the KV cache holds"):
                self.core.add(request)
            return
        index = self.core.add(request)
        # Steps that a request may take in the worst case: every job before it, one row at a time.
        self.ahead[index] = sum(len(r.prompt) + (r.max_tokens or 0) for r in self.live.values())
        self.live[index] = request
        self.drawn[index], self.age[index] = [], 0

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.live)))
        self.core.cancel(index)
        assert index not in self.core and index not in self.model.cache
        del self.live[index]

    @rule(steps=st.integers(1, 30))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    @rule()
    def reset(self) -> None:
        self.core.reset()

    @precondition(lambda self: self.live)
    @rule()
    def fail(self) -> None:
        """A step breaks: its requests end with an error, nobody else does."""
        batch: list[int] = []

        def broken(requests: list[tuple[Any, int]]) -> None:
            batch.extend(sequence for sequence, _ in requests)
            raise RuntimeError("broken")

        self.model.fail = broken
        outputs = self.core.step()
        self.model.fail = None
        assert [index for index, _ in outputs] == batch and batch
        for index, piece in outputs:
            assert piece.finish_reason == "error" and piece.error == "RuntimeError: broken"
            del self.live[index]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def poison(self, data: st.DataObject) -> None:
        """Logits that are not finite end one request, and whoever's next token sees the same."""
        index = data.draw(st.sampled_from(sorted(self.live)))
        tokens = self.seen(index)
        self.model.poison = lambda seen: seen == tokens
        for output, piece in self.core.step():
            if piece.finish_reason == "error":
                assert self.seen(output) == tokens
                assert piece.error == "the model's logits are not finite"
                del self.live[output]
            else:
                self.take(output, piece)
        self.model.poison = None

    def seen(self, index: int) -> list[int]:
        """What the last token of a request sees."""
        return [*self.live[index].prompt, *self.drawn[index]][-(self.window or 0) :]

    def step(self) -> None:
        for index in self.live:
            self.age[index] += 1
        outputs = self.core.step()
        assert bool(self.live) >= bool(outputs)
        for index, piece in outputs:
            self.take(index, piece)

    def take(self, index: int, piece: Piece) -> None:
        request = self.live[index]
        assert piece.token is not None and piece.error is None
        self.drawn[index].append(piece.token.id)
        if piece.finish_reason is not None:
            self.finish(index, request, piece)

    def finish(self, index: int, request: Request, piece: Piece) -> None:
        drawn = self.drawn[index]
        assert piece.finish_reason == "length" and len(drawn) == request.max_tokens
        assert drawn == solo(request, self.window)
        assert piece.stats is not None and piece.stats.completion_tokens == len(drawn)
        assert self.age[index] <= self.ahead[index] + len(request.prompt) + len(drawn)
        del self.live[index]
        self.finished += 1

    @invariant()
    def whole(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check_integrity()
        stats = self.core.stats()
        assert stats.running + stats.waiting == len(self.live)
        assert stats.running <= stats.max_running
        if not self.live:
            assert stats.used_pages == 0

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        while self.live:
            self.step()
        self.whole()
        self.core.reset()
        assert self.model.cache.num_free_pages == self.model.cache.pool.num_pages


_SOLO: dict[Any, list[int]] = {}


def solo(request: Request, window: int | None) -> list[int]:
    """The tokens of a request that has an engine for itself."""
    key = (tuple(request.prompt), request.sampling.temperature, request.sampling.seed, window)
    known = _SOLO.get(key, [])
    if len(known) < (request.max_tokens or 0):
        core = fake_core(FakeModel(300, 64, 1, window=window), prefix_cache=False)
        core.add(Request(request.prompt, request.sampling, max_tokens=60))
        known = []
        while core.has_work:
            known += [piece.token.id for _, piece in core.step() if piece.token is not None]
        _SOLO[key] = known
    return known[: request.max_tokens]


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
