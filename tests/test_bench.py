"""How speeds are measured: turns, medians and ratios; what a round leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq.bench import contexts
from kvq.bench.contexts import Decoding, fill, fill_all
from kvq.bench.step_peers import check_peers
from kvq.bench.step_plot import check_plot, plot_rates, write_csv
from kvq.bench.timing import take_turns
from kvq.cli.bench_model import numbers
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
        self.cache = PagedKVCache(layout, num_pages=20, num_open=6, num_workspace=4)
        self.steps: list[list[tuple[Any, int]]] = []
        self.copies: list[tuple[int, int]] = []

        class _Model:
            vocab_size = 100

        class _Metadata:
            model = _Model

        self.metadata = _Metadata
        self.tensors = self

    def copy_sealed(self, src: int, dst: int) -> None:
        self.copies.append((src, dst))

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


def test_only_the_first_sequence_is_computed_and_all_have_pages_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = Recorder()
    monkeypatch.setattr(contexts, "COMPUTED", 70)
    for name in "abc":
        model.cache.add_sequence(name)
    fill_all(model, "abc", 100, chunk=48)
    assert model.steps == [[("a", 48)], [("a", 22)]]
    pages = {name: list(model.cache.sequence(name).pages) for name in "abc"}
    assert [model.cache.length(name) for name in "abc"] == [100] * 3
    assert len({page for own in pages.values() for page in own}) == 9
    first = pages["a"]
    assert model.copies == [
        (first[0], first[2]),
        *((first[at % 2], page) for name in "bc" for at, page in enumerate(pages[name])),
    ]
    model.cache.check_integrity()


@pytest.mark.parametrize("batch", [1, 3])
def test_a_decode_round_leaves_the_context_as_it_was(batch: int) -> None:
    model: Any = Recorder()
    names = [f"sequence {i}" for i in range(batch)]
    for name in names:
        model.cache.add_sequence(name)
    fill_all(model, names, 100, chunk=100)
    before = model.cache.num_free_pages
    seconds = Decoding(model, names, steps=40).round()
    assert seconds > 0
    assert model.steps[1:] == [[(f"fork of {name}", 1) for name in names]] * 40
    assert [model.cache.length(name) for name in names] == [100] * batch
    assert model.cache.num_free_pages == before and model.cache.sequence_ids == names
    model.cache.check_integrity()


ROWS: list[dict[str, Any]] = [
    {
        "kv": kv,
        "batch": batch,
        "context": context,
        "tokens_per_second": 10.0 * batch,
        "slowest": 9.0,
        "ratio": 1,
    }
    for kv in ("int4", "torch eager")
    for batch in (1, 8)
    for context in (1024, 8192)
]


def test_figures_as_csv_and_as_a_plot(tmp_path: Path) -> None:
    write_csv(ROWS, tmp_path / "rates.csv")
    lines = (tmp_path / "rates.csv").read_text().splitlines()
    assert lines[0] == "kv,batch,context,tokens_per_second,slowest,ratio" and len(lines) == 9
    assert lines[1] == "int4,1,1024,10.0,9.0,1"
    plot_rates(ROWS, tmp_path / "rates.svg")
    text = (tmp_path / "rates.svg").read_text()
    assert all(f"<!-- {label} -->" in text for label in ("batch 8", "context 1024", "torch eager"))
    plot_rates([{"kv": "int4", "tokens": 30, "tokens_per_second": 5.0}], tmp_path / "prefill.png")
    assert (tmp_path / "prefill.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="must end in"):
        check_plot("rates.txt")
    with pytest.raises(ConfigError, match="--csv"):
        write_csv(ROWS, tmp_path / "missing" / "rates.csv")


def test_peers_that_are_servers_are_measured_as_servers() -> None:
    check_peers(["torch", "torch-compile"])
    with pytest.raises(ConfigError, match="kvq bench serve --url"):
        check_peers(["vllm"])
