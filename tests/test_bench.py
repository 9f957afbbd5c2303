"""How speeds are measured: turns, medians and ratios; what a round leaves behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvq.bench.run import Decoding, fill
from kvq.bench.timing import take_turns
from kvq.cli.bench import numbers
from kvq.errors import ConfigError
from kvq.layout import KVLayout
from kvq.runtime.kv_cache import PagedKVCache


def test_rounds_take_turns_and_ratios_are_of_the_same_round() -> None:
    order: list[str] = []
    seconds = {"none": iter([9.0, 1.0, 4.0, 1.0]), "int4": iter([9.0, 2.0, 2.0, 0.5])}

    def share(name: str) -> Any:
        def work() -> float:
            order.append(name)
            return next(seconds[name])

        return work

    none, int4 = take_turns(["none", "int4"], [share("none"), share("int4")], tokens=8, rounds=3)
    assert order == ["none", "int4", "int4", "none", "none", "int4", "int4", "none"]
    assert (none.tokens_per_second, none.slowest, none.fastest, none.ratio) == (8.0, 2.0, 8.0, 1.0)
    assert (int4.tokens_per_second, int4.slowest, int4.fastest) == (4.0, 4.0, 16.0)
    assert int4.ratio == 2.0  # of 0.5, 2 and 2
    assert int4.rounds == 3


def test_numbers() -> None:
    assert numbers("128,2048, 8000", "--context") == [128, 2048, 8000]
    for text in ("", "12a", "1.5", ","):
        with pytest.raises(ConfigError, match="--context"):
            numbers(text, "--context")


class Recorder:
    """Steps a real cache state machine, and records the steps instead of computing them."""

    def __init__(self) -> None:
        layout = KVLayout(1, 1, 64, page_size=32)
        self.cache = PagedKVCache(layout, num_pages=20, num_open=4, num_workspace=4)
        self.steps: list[list[tuple[Any, int]]] = []

        class _Model:
            vocab_size = 100

        class _Metadata:
            model = _Model

        self.metadata = _Metadata

    def likeliest(self, requests: list[tuple[Any, int]], ids: Any) -> np.ndarray:
        return self.step(requests, ids).argmax(axis=1)

    def step(self, requests: list[tuple[Any, int]], ids: Any) -> np.ndarray:
        assert len(ids) == sum(count for _, count in requests)
        self.cache.begin_step(requests)
        self.cache.commit_step()
        self.steps.append(list(requests))
        return np.eye(len(requests), 100, dtype=np.float32)


def test_filling_appends_what_is_missing_in_chunks() -> None:
    model: Any = Recorder()
    model.cache.add_sequence("base")
    fill(model, "base", 100, chunk=48)
    assert [requests[0][1] for requests in model.steps] == [48, 48, 4]
    fill(model, "base", 128, chunk=48)
    assert model.cache.length("base") == 128
    assert len(model.steps) == 4


@pytest.mark.parametrize("batch", [1, 3])
def test_a_decode_round_leaves_the_context_as_it_was(batch: int) -> None:
    model: Any = Recorder()
    model.cache.add_sequence("base")
    fill(model, "base", 100, chunk=100)
    before = model.cache.num_free_pages
    seconds = Decoding(model, batch, steps=40).round()
    assert seconds > 0
    assert model.steps[1:] == [[(f"fork {i}", 1) for i in range(batch)]] * 40
    assert (model.cache.length("base"), model.cache.num_free_pages) == (100, before)
    assert model.cache.sequence_ids == ["base"]
    model.cache.check_integrity()
