"""``AsyncEngine`` over a fake model: streams, cancellation, slow readers, failures, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fake_model import FakeModel, fake_core, fake_parts
from kvq.engine import AsyncEngine
from kvq.engine.request import Piece, Request
from kvq.errors import ConfigError, EngineError
from kvq.runtime.sampler import SamplingParams

GREEDY = SamplingParams(temperature=0)


class Rig:
    """An engine whose model can be stopped before each step."""

    def __init__(self, num_open: int = 4, pages: int | None = None) -> None:
        self.model = FakeModel(300, 64, num_open, pages)
        self.core = fake_core(self.model)
        self.engine = AsyncEngine.of(fake_parts(self.core))
        self.gate = threading.Event()
        self.gate.set()
        self.model.fail = self.wait

    def wait(self, _requests: Any) -> None:
        self.gate.wait(10)

    async def idle(self) -> None:
        """Wait until nothing runs; then no page may be held."""
        for _ in range(500):
            stats = self.engine.stats()
            if not stats.running + stats.waiting:
                break
            await asyncio.sleep(0.01)
        assert (stats.running, stats.waiting, stats.used_pages) == (0, 0, 0)
        self.core.check_integrity()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.gate.set()
    rig.engine.shutdown()


async def collect(engine: AsyncEngine, request: Request) -> list[Piece]:
    return [piece async for piece in engine.generate(request)]


def ids_of(pieces: list[Piece]) -> list[int]:
    return [piece.token.id for piece in pieces if piece.token is not None]


def prompt(index: int) -> list[int]:
    return [33 + index] * (20 + 7 * index)


def test_many_tasks_get_the_answers_of_a_solo_run(rig: Rig) -> None:
    async def main() -> None:
        requests = [Request(prompt(i % 6), GREEDY, max_tokens=10 + i) for i in range(18)]
        answers = await asyncio.gather(*[collect(rig.engine, request) for request in requests])
        for request, pieces in zip(requests, answers, strict=True):
            assert ids_of(pieces) == rig.model.greedy(request.prompt, request.max_tokens or 0)
            assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
            assert pieces[-1].finish_reason == "length" and pieces[-1].stats is not None
        await rig.idle()

    asyncio.run(main())
    assert max(rig.model.batches) == 4 and rig.engine.stats().finished == 18


def test_two_event_loops(rig: Rig) -> None:
    found: dict[int, list[int]] = {}

    def ask(index: int) -> None:
        request = Request(prompt(index), GREEDY, max_tokens=30)
        found[index] = ids_of(asyncio.run(collect(rig.engine, request)))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: rig.model.greedy(prompt(i), 30) for i in range(5)}


@pytest.mark.parametrize("how", ["close", "cancel", "before it runs"])
def test_an_abandoned_request_frees_its_pages(rig: Rig, how: str) -> None:
    def step(requests: Any) -> None:
        rig.wait(requests)
        time.sleep(0.005)  # or all tokens are drawn before anybody can go

    rig.model.fail = step

    async def main() -> None:
        if how == "before it runs":
            rig.gate.clear()
            others = [
                asyncio.ensure_future(collect(rig.engine, Request(prompt(i), GREEDY, 20))) for i in range(4)
            ]
            await asyncio.sleep(0.05)
        stream = rig.engine.generate(Request([50] * 100, GREEDY, max_tokens=200))
        if how == "close":
            await stream.__anext__()
            await stream.aclose()  # type: ignore[attr-defined]
        else:
            task = asyncio.ensure_future(collect(rig.engine, Request([50] * 100, GREEDY, max_tokens=200)))
            await asyncio.sleep(0.05)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if how == "before it runs":
            rig.gate.set()
            for index, other in enumerate(others):
                assert ids_of(await other) == rig.model.greedy(prompt(index), 20)
        await rig.idle()
        assert rig.engine.stats().generated_tokens < 150

    asyncio.run(main())


def test_a_slow_reader_holds_no_pages(rig: Rig) -> None:
    async def main() -> None:
        stream = rig.engine.generate(Request([50] * 10, GREEDY, max_tokens=60))
        first = await stream.__anext__()
        await rig.idle()
        rest = [piece async for piece in stream]
        assert ids_of([first, *rest]) == rig.model.greedy([50] * 10, 60)

    asyncio.run(main())


def test_requests_of_one_reader_come_together(rig: Rig) -> None:
    async def main() -> None:
        rig.gate.clear()
        requests = [Request([33 + i] * 20, GREEDY, max_tokens=5 + i) for i in range(3)]
        found: list[list[Piece]] = [[], [], []]
        together = 0
        async for pieces in rig.engine.run(requests):
            together = max(together, len({index for index, _ in pieces}))
            for index, piece in pieces:
                found[index].append(piece)
        assert together == 3
        for request, pieces in zip(requests, found, strict=True):
            assert ids_of(pieces) == rig.model.greedy(request.prompt, request.max_tokens or 0)
        await rig.idle()

    threading.Timer(0.1, rig.gate.set).start()
    asyncio.run(main())


def test_tokens_are_handed_out_while_the_next_step_runs(rig: Rig) -> None:
    permits = threading.Semaphore(1)
    rig.model.fail = lambda _: permits.acquire(timeout=10) or pytest.fail("a step never ran")

    async def main() -> None:
        stream = rig.engine.generate(Request(prompt(1), GREEDY, max_tokens=3))
        pieces = [await asyncio.wait_for(stream.__anext__(), 5)]
        assert len(rig.model.steps) == 1, "the second step waits for its permit"
        permits.release(2)
        pieces += [piece async for piece in stream]
        assert ids_of(pieces) == rig.model.greedy(prompt(1), 3)

    asyncio.run(main())


def test_what_can_never_run_is_refused(rig: Rig) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="the prompt is empty"):
            await collect(rig.engine, Request([]))

    asyncio.run(main())
    with pytest.raises(ConfigError, match="logit_bias names token 999"):
        rig.engine.check(Request([5], SamplingParams(logit_bias={999: 1.0})))


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(rig: Rig) -> None:
    def fail(requests: list[tuple[Any, int]]) -> None:
        if len(rig.model.steps) >= 6:
            rig.model.fail = None
            raise RuntimeError("first line\nbroken step")

    rig.model.fail = fail

    async def main() -> None:
        request = Request(prompt(1), GREEDY, max_tokens=30)
        pieces = await collect(rig.engine, request)
        assert pieces[-1].finish_reason == "error" and pieces[-1].error == "RuntimeError: broken step"
        assert ids_of(await collect(rig.engine, request)) == rig.model.greedy(prompt(1), 30)
        await rig.idle()

    asyncio.run(main())
    assert rig.engine.stats().failed == 1


def test_an_error_of_the_engine_itself_ends_what_runs_and_no_more(rig: Rig) -> None:
    schedule = rig.core.scheduler.schedule

    def broken() -> Any:
        if len(rig.model.steps) < 5:
            return schedule()
        rig.core.scheduler.schedule = schedule  # type: ignore[method-assign]
        raise AssertionError("a bug")

    rig.core.scheduler.schedule = broken  # type: ignore[method-assign]

    async def main() -> None:
        requests = [Request(prompt(i), GREEDY, max_tokens=30) for i in range(6)]
        answers = await asyncio.gather(*[collect(rig.engine, request) for request in requests])
        assert {pieces[-1].error for pieces in answers} == {"AssertionError: a bug"}
        assert rig.engine.stats().cached_pages == 0
        assert ids_of(await collect(rig.engine, requests[2])) == rig.model.greedy(prompt(2), 30)
        await rig.idle()

    asyncio.run(main())


def test_shutdown_lets_answers_finish() -> None:
    rig = Rig()

    async def main() -> None:
        task = asyncio.ensure_future(collect(rig.engine, Request(prompt(1), GREEDY, max_tokens=100)))
        await asyncio.sleep(0.02)
        assert await asyncio.to_thread(rig.engine.shutdown, 30.0) == 0
        assert ids_of(await task) == rig.model.greedy(prompt(1), 100)
        with pytest.raises(EngineError, match="shutting down"):
            await collect(rig.engine, Request(prompt(1)))

    asyncio.run(main())


def test_shutdown_aborts_what_takes_too_long() -> None:
    rig = Rig(num_open=1)
    rig.model.fail = lambda _: time.sleep(0.02)

    async def main() -> None:
        requests = [Request(prompt(i), GREEDY, max_tokens=200) for i in range(3)]
        tasks = [asyncio.ensure_future(collect(rig.engine, request)) for request in requests]
        await asyncio.sleep(0.1)
        assert await asyncio.to_thread(rig.engine.shutdown, 0.1) == 3
        for task in tasks:
            last = (await task)[-1]
            assert last.finish_reason == "abort" and last.error == "the engine is shutting down"
        await rig.idle()

    asyncio.run(main())
