"""The page of all evaluations, its tables and plots, and the command on a tiny compiled model."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvq.cli.main import main
from kvq.errors import ConfigError
from kvq.eval import plots
from kvq.eval.report import SECTIONS, evaluate_all, render, write
from tiny_llama import TinyLlama

COMMON = {"quantization": "q0f16", "opt": "O1", "chunk": 512, "quantized_keys": 5, "keys": 9}


def perplexity_row(kv: str, bits: float, kl: float) -> dict[str, Any]:
    numbers = dict.fromkeys(
        ("perplexity", "stderr", "delta_percent", "delta_stderr", "kl_stderr", "kl_p99", "top1_percent"), 1.25
    )
    own = {"kv": kv, "bits_per_value": bits, "bits_per_value_d128": bits, "kl": kl, "scored_tokens": 4000}
    return {**numbers, **own, "window": 1024, "scheme": f"pages of {kv}", "attends": "5 of 9", **COMMON}


def retrieval_row(task: str, kv: str, hits: int) -> dict[str, Any]:
    cells = [
        {"length": n, "depth": depth, "trials": 10, "hits": hits} for n in (512, 1024) for depth in (20, 80)
    ]
    counts = {"trials": 40, "hits": 4 * hits, "percent": 10.0 * hits, "lost": 1, "gained": 0, "p_value": 1.0}
    return {
        **{"task": task, "kv": kv, "bits_per_value": 4.25, "delta_points": -1.5, "delta_stderr": None},
        **{**counts, "cells": cells, **COMMON},
    }


def generate_row(kv: str, ends: list[int]) -> dict[str, Any]:
    means = {
        "median_divergence": 7,
        "mean_divergence": 7.0,
        "identical_percent": 50.0,
        "bits_per_value": 4.25,
    }
    return {"kv": kv, "prompts": 3, "prompt_tokens": 384, "tokens": 8, "divergence": ends, **means, **COMMON}


def structured_row(kv: str, percent: float) -> dict[str, Any]:
    percents = {f"{what}_percent": percent for what in ("json", "valid", "correct", "same")}
    return {"kv": kv, "tasks": 16, "examples": 8, "bits_per_value": 4.25, **percents, **COMMON}


@pytest.fixture
def results() -> dict[str, Any]:
    return {
        "perplexity": [perplexity_row("float32", 32, 0), perplexity_row("int4", 4.25, 0.0093)],
        "retrieval": [
            retrieval_row(task, kv, hits)
            for task in ("needle", "kv")
            for kv, hits in (("none", 9), ("int4", 8))
        ],
        "generate": [generate_row("none", [8, 8, 8]), generate_row("int4", [2, 8, 5])],
        "json": [structured_row("none", 93.75), structured_row("int4", 87.5)],
    }


class Page(HTMLParser):
    """What a page holds: sections, cells of tables, plots, and whatever it would fetch from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.cells: list[str] = []
        self.plots = 0
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.plots += tag == "svg"
        for name, value in attrs:
            if tag == "section" and name == "id":
                self.sections.append(str(value))
            if tag in ("link", "script", "img") or (name in ("src", "href", "xlink:href") and value):
                self.fetched += [] if str(value).startswith("#") else [f"{tag} {name}={value}"]

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells.append(data)

    def handle_endtag(self, tag: str) -> None:
        self.open.append("/" + tag)


def test_page_holds_all_and_needs_nothing(results: dict[str, Any]) -> None:
    text = render("a <model> & co", results)
    page = Page(text)
    assert page.sections == ["perplexity", "retrieval", "generate", "json"] == list(SECTIONS)
    assert page.plots == 4 and page.fetched == []
    assert "a &lt;model&gt; &amp; co" in text and "<model>" not in text
    assert {"int4", "0.00930", "80.0%", "-1.5", "87.5%"} <= set(page.cells)
    assert "int4 kv: attends to quantized pages: 5 of 9 keys" in text
    assert "4000 tokens scored in windows of 1024" in text


def test_page_of_one_section(results: dict[str, Any]) -> None:
    assert Page(render("model", {"json": results["json"]})).sections == ["json"]


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_foreign_rows_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the rows of {name} are not what kvq eval {name} --json prints"):
        render("model", {name: [{"kv": "none"}]})


def lines(figure: Any, axes: int) -> dict[str, list[float]]:
    """Data of the lines of a figure, by label."""
    return {line.get_label(): list(map(float, line.get_ydata())) for line in figure.axes[axes].get_lines()}


def test_figures_draw_the_rows(results: dict[str, Any]) -> None:
    assert lines(plots.perplexity_figure(results["perplexity"]), 0) == {"int4": [0.0093]}
    figure = plots.retrieval_figure(results["retrieval"])
    assert [axes.get_title() for axes in figure.axes] == [
        f"{task}, {length} tokens" for task in ("needle", "kv") for length in (512, 1024)
    ]
    assert lines(figure, 3) == {"none": [90, 90], "int4": [80, 80]}
    drawn = lines(plots.generate_figure(results["generate"]), 0)
    assert drawn["none"] == [100] * 8
    assert drawn["int4"] == pytest.approx([100] * 2 + [200 / 3] * 3 + [100 / 3] * 3)
    bars = plots.structured_figure(results["json"]).axes[0].patches
    assert [bar.get_height() for bar in bars] == [93.75] * 4 + [87.5] * 4


@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_plot_perplexity_writes_by_suffix(
    results: dict[str, Any], tmp_path: Path, suffix: str, start: bytes
) -> None:
    path = tmp_path / f"plot{suffix}"
    plots.plot_perplexity(results["perplexity"], path)
    assert path.read_bytes().startswith(start)
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match=r"must end in \.svg, \.png or \.pdf"):
        plots.plot_perplexity(results["perplexity"], tmp_path / "plot.gif")


def test_plots_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"install kvq\[eval\]"):
        evaluate_all("model", ["none"])


def test_write_leaves_the_old_page_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write("old", path)
    with pytest.raises(UnicodeEncodeError):
        write("new \ud800", path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_known_rows_are_not_measured_again(
    results: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "eval",
        "report",
        "MODEL",
        "-o",
        str(tmp_path / "page.html"),
        "--results",
        str(tmp_path / "all.json"),
    ]
    for name, rows in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
        words += ["--rows", f"{name}={tmp_path / name}.json"]
    assert main(words) == 0
    assert (tmp_path / "page.html").read_text() == render("MODEL", results)
    assert json.loads((tmp_path / "all.json").read_text()) == results
    assert "page.html: perplexity, retrieval, generate, json" in capsys.readouterr().out


@pytest.mark.slow
def test_eval_report_of_a_tiny_model(
    tmp_path: Path, build_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every section through one library; a token is a letter, so the budgets are small."""
    monkeypatch.setenv("KVQ_CACHE", str(build_cache))
    small = {
        "perplexity": {"text": "opticks", "max_tokens": 300},
        "retrieval": {"lengths": (300,), "depths": (20, 80), "trials": 2, "chunk": 128},
        "generate": {"prompts": 2, "prompt_tokens": 70, "tokens": 5},
        "json": {"tasks": 4, "examples": 1},
    }
    for name, options in small.items():
        monkeypatch.setitem(SECTIONS[name].quick, "chunk", 256)
        for key, value in options.items():
            monkeypatch.setitem(SECTIONS[name].quick, key, value)
    checkpoint = TinyLlama(seed=20, gqa=3, head_dim=64).write(tmp_path / "model")
    page = tmp_path / "page.html"
    words = [
        "eval",
        "report",
        str(checkpoint),
        "--quantization",
        "q0f32",
        "--kv",
        "none,int3",
        "-o",
        str(page),
    ]
    assert main(words) == 0
    text = page.read_text()
    assert Page(text).sections == list(SECTIONS)
    told = re.findall(r"<li>int3[^<]*quantized pages: (\d+) of (\d+) keys", text)
    assert len(told) >= 4 and all(0 < int(part) < int(whole) for part, whole in told)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--rows", "speed=x.json"], "--rows speed=x.json"),
        (["--rows", "json"], "--rows json"),
        (["--rows", "json=absent.json"], "absent.json"),
        (["--rows", "json=bad.json"], "--rows json=bad.json"),
        (["--rows", "json=empty.json"], "--rows json=empty.json"),
        (["-o", "nowhere/page.html"], "nowhere"),
        (["--kv", "int5"], "int5"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("[")
    (tmp_path / "empty.json").write_text("[]")
    assert main(["eval", "report", "MODEL", "-o", "page.html", *words]) == 2
    problem = capsys.readouterr().err
    assert named in problem and problem.count("\n") == 1
    assert not (tmp_path / "page.html").exists()
