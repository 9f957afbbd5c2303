"""``kvq bench serve``: loads from a seed, and figures that add up."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq.bench.serve import Record, ServeResult, bench_serve
from kvq.bench.serve_load import Load, make_requests
from kvq.bench.serve_peers import comparison
from kvq.cli.main import main
from kvq.errors import ConfigError, EngineError
from serving import serve_fake

SMALL = Load(
    requests=12, clients=4, prefix_tokens=20, most_prompt_tokens=8, most_answer_tokens=10, shared_part=0.5
)


def test_a_seed_decides_the_load() -> None:
    load = Load(requests=400, shared_part=0.25, prefixes=3)
    made = make_requests(load)
    assert (
        made == make_requests(load) != make_requests(Load(requests=400, shared_part=0.25, prefixes=3, seed=1))
    )
    assert sum(one.shared for one in made) == 100
    starts = Counter(" ".join(one.prompt.split()[:512]) for one in made if one.shared)
    assert len(starts) == 3
    lengths = np.array([len(one.prompt.split()) for one in made if not one.shared])
    assert 40 < np.median(lengths) < 90 and lengths.max() > 400, "many are short, few are long"
    assert all(4 <= one.max_tokens <= 256 for one in made)


@pytest.mark.parametrize("wrong", [{"clients": 0}, {"requests": 0}, {"shared_part": 1.5}])
def test_impossible_loads_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="makes no sense"):
        Load(**wrong)  # type: ignore[arg-type]


def test_figures_of_a_load() -> None:
    with serve_fake(context=600, num_pages=120) as served:
        result = bench_serve(served.url, SMALL)
        stats = served.core.stats()
        served.check_idle()
    figures = result.to_dict()
    requests = make_requests(SMALL)
    assert figures["errors"] == 0 and stats.finished == 12
    assert figures["answer_tokens"] == sum(one.max_tokens for one in requests) == stats.generated_tokens
    assert figures["prompt_tokens"] == sum(len(one.prompt) for one in requests) == stats.prompt_tokens
    assert figures["hit_rate"] == stats.hit_tokens / stats.prompt_tokens > 0
    assert 0 < figures["peak_pages"] <= figures["total_pages"] == 120
    assert figures["answer_tokens_per_second"] == pytest.approx(figures["answer_tokens"] / figures["seconds"])
    for record, request in zip(result.records, requests, strict=True):
        assert record.shared == request.shared and len(record.gaps) == request.max_tokens - 1
        assert record.first_token + sum(record.gaps) <= figures["seconds"]


def test_percentiles() -> None:
    records = [
        Record(i < 50, first_token=i / 100, gaps=[0.5], prompt_tokens=1, answer_tokens=2) for i in range(101)
    ]
    records[0].error = "lost"
    figures = ServeResult(Load(), "http://x", records, 10.0, None, None).to_dict()
    assert figures["errors"] == 1 and figures["requests_per_second"] == 10
    assert figures["first_token_p50"] == pytest.approx(0.505) and figures["first_token_p95"] == pytest.approx(
        0.9505
    )
    assert figures["first_token_shared_p50"] == pytest.approx(0.25)
    assert figures["inter_token_p99"] == 0.5


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    small = ["--requests", "6", "--clients", "3", "--prefix-tokens", "10", "--most-prompt-tokens", "8"]
    with serve_fake(context=600, num_pages=120) as served:
        plot = tmp_path / "load.svg"
        argv = ["bench", "serve", "--url", served.url, *small, "--most-answer-tokens", "6"]
        assert main([*argv, "--plot", str(plot)]) == 0
        shown = capsys.readouterr().out
        assert "answer tokens per second" in shown and "first token, shared prefix" in shown
        assert plot.read_text().lstrip().startswith("<?xml")
        assert main([*argv, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["requests"] == 6


def test_peers_get_the_same_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    small = ["--requests", "5", "--clients", "2", "--prefix-tokens", "10", "--most-prompt-tokens", "8"]
    with serve_fake(context=600, num_pages=120) as ours, serve_fake(api_key="k", context=600) as theirs:
        plot = tmp_path / "both.svg"
        argv = ["bench", "serve", "--url", ours.url, "--peer", theirs.url, "--peer-api-key", "k", *small]
        assert main([*argv, "--most-answer-tokens", "6", "--plot", str(plot), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        (peer,) = found["peers"]
        assert (
            found["url"] == ours.url and peer["url"] == theirs.url and found["errors"] == peer["errors"] == 0
        )
        assert found["answer_tokens"] == peer["answer_tokens"] == theirs.core.stats().generated_tokens
        assert found["prompt_tokens"] == peer["prompt_tokens"]
        assert "own prompt" in plot.read_text()
        assert main([*argv, "--most-answer-tokens", "6"]) == 0
        shown = capsys.readouterr().out
        assert "ratio" in shown and "next token, p99" in shown
        assert main([*argv[:6], *small]) == 2 and "401" in capsys.readouterr().err


def test_figures_beside_each_other() -> None:
    def figures(first: float, gap: float) -> dict[str, Any]:
        records = [Record(False, first, [gap] * 3, answer_tokens=4)] * 2
        return ServeResult(Load(), "http://x", records, 2.0, None, None).to_dict()

    rows = {row[0]: row[1:] for row in comparison([figures(0.1, 0.01), figures(0.2, 0.005)])}
    assert rows["first token, p50, ms"] == ["100.0", "200.0", "2.00x"]
    assert rows["next token, p99, ms"] == ["10.0", "5.0", "0.50x"]
    assert rows["answer tokens per second"] == ["4.0", "4.0", "1.00x"] and rows["errors"] == ["0", "0", "-"]


@pytest.mark.parametrize("peer", ["torch", "vllm", "127.0.0.1:8000", "http://"])
def test_a_peer_is_an_address(peer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9", "--peer", peer]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"--peer {peer} is no server" in said and "http://127.0.0.1:8000" in said
    assert ("kvq bench decode" in said) == (peer == "torch")


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve"]) == 2
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "MODEL or --url" in lines[0] and "no OpenAI-compatible server" in lines[1]


def test_a_load_that_fails_altogether_says_why() -> None:
    with serve_fake(context=64) as served, pytest.raises(EngineError, match="context window 64"):
        bench_serve(served.url, Load(requests=2, clients=1, shared_part=1))
