"""Which steps run as they are, which are recorded, and which are launched; no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvq.errors import LibraryError
from kvq.runtime import step_graphs
from kvq.runtime.step_graphs import StepGraphs


class FakeDriver:
    """Stands in for ``CudaDriver``: a graph is a number."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.graphs = 0
        self.free = 1000

    def capture(self, work: Callable[[], None]) -> int:
        work()
        self.graphs += 1
        self.done.append(f"capture {self.graphs}")
        return self.graphs

    def launch(self, graph: int) -> None:
        self.done.append(f"launch {graph}")

    def synchronize(self) -> None:
        self.done.append("wait")

    def memory(self) -> tuple[int, int]:
        return self.free, 1000

    def free_graph(self, graph: int) -> None:
        self.done.append(f"free {graph}")


def test_the_first_step_of_a_key_runs_the_second_is_recorded() -> None:
    driver, worked = FakeDriver(), []
    graphs = StepGraphs(driver)  # type: ignore[arg-type]

    def work() -> int:
        worked.append(None)
        return len(worked)

    assert graphs.run("a", work) == 1
    assert driver.done == []
    assert graphs.run("a", work) == 2
    assert driver.done == ["capture 1", "launch 1"]
    assert [graphs.run("a", work) for _ in range(3)] == [2, 2, 2]
    assert graphs.run("b", work) == 3, "another key has its own"
    assert driver.done == ["capture 1", *["launch 1"] * 4]


def test_the_graph_that_was_not_used_for_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MAX_GRAPHS", 2)
    driver = FakeDriver()
    graphs = StepGraphs(driver)  # type: ignore[arg-type]
    for key in "aabba":
        graphs.run(key, lambda: None)
    for _ in range(2):
        graphs.run("c", lambda: None)
    assert driver.done[-4:] == ["capture 3", "wait", "free 2", "launch 3"]
    graphs.run("a", lambda: None)
    assert driver.done[-1] == "launch 1"


def test_a_capture_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    graphs = StepGraphs(driver)  # type: ignore[arg-type]
    graphs.run("a", lambda: None)
    with pytest.raises(ZeroDivisionError):
        graphs.run("a", lambda: 1 / 0)
    assert graphs.run("a", lambda: "made") == "made"
    assert driver.done == ["capture 1", "launch 1"]


def test_graphs_go_before_their_memory_may() -> None:
    driver = FakeDriver()
    graphs = StepGraphs(driver)  # type: ignore[arg-type]
    for _ in range(2):
        graphs.run("a", lambda: None)
    graphs.make_room(1000)
    assert "a" in graphs
    driver.free = 10
    graphs.make_room(11)
    assert "a" not in graphs and driver.done[-2:] == ["wait", "free 1"]
    assert graphs.run("a", lambda: "as it is") == "as it is"


def test_what_the_driver_refuses_to_record_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    driver, worked, refused = FakeDriver(), [], []
    graphs = StepGraphs(driver)  # type: ignore[arg-type]

    def refuse(_work: Callable[[], None]) -> int:
        refused.append(None)
        raise LibraryError("cuStreamEndCapture failed")

    driver.capture = refuse  # type: ignore[method-assign]
    for turn in range(6):
        assert graphs.run("a", lambda turn=turn: worked.append(turn) or turn) == turn
    assert worked == [*range(6)] and driver.done == []
    assert len(refused) == step_graphs.MAX_ATTEMPTS and len(caplog.records) == 1


def test_what_is_refused_once_is_recorded_the_next_time(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver()
    graphs, capture, refused = StepGraphs(driver), driver.capture, []  # type: ignore[arg-type]

    def refuse_once(work: Callable[[], None]) -> int:
        if not refused:
            refused.append(None)
            raise LibraryError("cuStreamEndCapture failed")
        return capture(work)

    driver.capture = refuse_once  # type: ignore[method-assign]
    for turn in range(3):
        assert graphs.run("a", lambda turn=turn: turn) == turn
    assert driver.done == ["capture 1", "launch 1"] and not caplog.records
