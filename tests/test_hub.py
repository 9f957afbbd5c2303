"""Models of the Hugging Face hub through a client that is a stand-in: no network, no package."""

from __future__ import annotations

import fnmatch
import inspect
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoints import write_tiny_llama
from kvq.cli.main import main
from kvq.errors import CheckpointError
from kvq.hub import choose_files, fetch
from kvq.loader import TensorCache
from kvq.model_source import resolve_model


class RepositoryNotFoundError(Exception):
    """As the client calls it."""


class GatedRepoError(RepositoryNotFoundError):
    """As the client calls it."""


class FakeHub:
    """The two calls that kvq makes, on a directory that plays the hub."""

    def __init__(self, remote: Path, cache: Path) -> None:
        self.remote, self.cache = remote, cache
        self.fetched: list[str] = []
        self.problem: Exception | None = None

    def HfApi(self) -> FakeHub:
        return self

    def list_repo_files(self, repo_id: str, revision: str | None = None) -> list[str]:
        if self.problem is not None:
            raise self.problem
        assert repo_id == "org/name" and revision in (None, "v1")
        return [str(path.relative_to(self.remote)) for path in self.remote.rglob("*") if path.is_file()]

    def snapshot_download(
        self,
        repo_id: str,
        revision: str | None = None,
        allow_patterns: list[str] | None = None,
        local_files_only: bool = False,
    ) -> str:
        if local_files_only:
            if not self.cache.exists():
                raise FileNotFoundError("no snapshot")
            return str(self.cache)
        for name in self.list_repo_files(repo_id, revision):
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns or ["*"]):
                (self.cache / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.remote / name, self.cache / name)
                self.fetched.append(name)
        return str(self.cache)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    remote = write_tiny_llama(tmp_path / "remote", shards=2, num_layers=1)
    for extra in ("README.md", "consolidated.safetensors", "pytorch_model.bin", "onnx/model.safetensors"):
        (remote / extra).parent.mkdir(exist_ok=True)
        (remote / extra).write_bytes(b"large")
    fake = FakeHub(remote, tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)  # type: ignore[arg-type]
    return fake


def test_only_what_is_read_is_fetched(hub: FakeHub, tmp_path: Path) -> None:
    assert main(["convert_weight", "HF://org/name@v1", "-q", "q0f16", "-o", str(tmp_path / "out")]) == 0
    assert sorted(hub.fetched) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert TensorCache(tmp_path / "out").names


def test_a_gguf_file_of_several(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(hub.remote)
    hub.remote.mkdir()
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf"):
        (hub.remote / name).write_bytes(b"GGUF")
    assert main(["plan", "HF://org/name"]) == 2
    assert "the GGUF files a-Q" in capsys.readouterr().err
    assert resolve_model("HF://org/name/a-Q8_0.gguf") == hub.cache / "a-Q8_0.gguf"
    assert hub.fetched == ["a-Q8_0.gguf"]
    with pytest.raises(CheckpointError, match=r"has no file b\.gguf: it has the GGUF files"):
        fetch("HF://org/name/b.gguf")
    (hub.remote / "a-Q8_0.gguf").unlink()
    assert fetch("hf://org/name").name == "a-Q4_0.gguf"


def test_what_was_fetched_is_there_without_a_network(hub: FakeHub) -> None:
    first = fetch("HF://org/name")
    hub.problem = ConnectionError("name resolution failed\nat some depth")
    assert fetch("HF://org/name") == first
    (first / "model-00002-of-00002.safetensors").unlink()
    (first / "model-00001-of-00002.safetensors").unlink()
    (first / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError) as error:
        fetch("HF://org/name")
    assert str(error.value) == (
        "HF://org/name: the hub cannot be reached (name resolution failed): give a local directory instead"
    )


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (RepositoryNotFoundError("404\n\nRequest ID"), "the hub has no such model, or it is private"),
        (GatedRepoError("403"), "its licence has to be accepted on the hub first"),
        (OSError(28, "No space left on device"), "cannot be stored: No space left on device"),
    ],
)
def test_why_nothing_came(hub: FakeHub, problem: Exception, expected: str) -> None:
    hub.problem = problem
    with pytest.raises(CheckpointError, match=expected) as error:
        fetch("HF://org/name")
    assert "\n" not in str(error.value)


def test_without_the_client(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["convert_weight", "HF://org/name", "-o", "out"]) == 2
    line = capsys.readouterr().err.strip()
    assert "huggingface_hub is not installed: pip install 'kvq[hub]'" in line and "\n" not in line


def test_names_that_are_none() -> None:
    for name in ("HF://", "HF://org", "HF://org/name/file.txt", "HF://../../etc/passwd", "HF://a b/c"):
        with pytest.raises(CheckpointError, match="not a model of the hub: use HF://org/name"):
            fetch(name)


def test_weights_of_the_best_kind() -> None:
    config = ["config.json", "original/consolidated.00.pth", "qwen.tiktoken"]
    assert choose_files([*config, "pytorch_model.bin"]) == [
        "config.json",
        "pytorch_model.bin",
        "qwen.tiktoken",
    ]
    assert "pytorch_model.bin" not in choose_files([*config, "pytorch_model.bin", "model.safetensors"])
    assert choose_files(config) == []


def test_the_client_has_these_calls() -> None:
    """The stand-in's arguments are those of the package, where it is installed."""
    package: Any = pytest.importorskip("huggingface_hub")
    for real, fake in (
        (package.snapshot_download, FakeHub.snapshot_download),
        (package.HfApi.list_repo_files, FakeHub.list_repo_files),
    ):
        assert set(inspect.signature(fake).parameters) - {"self"} <= set(inspect.signature(real).parameters)
