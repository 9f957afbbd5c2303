"""Brings a model from whatever stage it is in to one that can run; what it makes stays in a cache directory.

Three stages are taken: a compiled pair (a converted directory with its library, or ``model_lib``), a
converted directory, and a checkpoint (a Hugging Face directory, a ``.gguf`` file or ``smollm2``).

What is made goes into ``<cache>/models/<checkpoint>/``: one directory of weights for each weight scheme,
shared by all cache schemes, and one with configuration, tokenizer and library for each way of compiling.
A directory appears under its name only when it is whole; a lock makes a second process wait for the first
instead of doing the same work.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvq import __version__
from kvq.cache_dir import default_cache_dir
from kvq.config import CHAT_CONFIG_NAME, ChatConfig
from kvq.cpu_features import detect
from kvq.errors import ConfigError, LibraryError
from kvq.gpu_features import cuda_archs
from kvq.model_source import resolve_model
from kvq.quantization.scheme import DEFAULT_QUANTIZATION, resolve

DEFAULT_OPT, DEFAULT_ACTIVATIONS = "O2", "auto"
#: Sources that decide what weights and libraries look like.
_SOURCES = ("compiler", "loader", "model", "passes", "quantization", "schedules", "layout.py", "convert.py")
LIBRARY_NAME = "lib.so"

#: Called with what is being done.
Report = Callable[[str], None]


@dataclass(frozen=True)
class BuiltModel:
    """A model that can run.

    Attributes
    ----------
    config_dir : Path
        Holds ``mlc-chat-config.json`` and the tokenizer.
    weights_dir : Path
        Holds the converted weights.
    library : Path
        The compiled library.
    """

    config_dir: Path
    weights_dir: Path
    library: Path


def prepare_model(
    model: str | Path,
    quantization: str | None = None,
    kv_quantization: str | None = None,
    *,
    context_window_size: int | None = None,
    prefill_chunk_size: int | None = None,
    max_batch_size: int | None = None,
    device: str = "cpu",
    opt: str | None = None,
    activations: str | None = None,
    model_lib: str | Path | None = None,
    cache_dir: Path | None = None,
    report: Report | None = None,
) -> BuiltModel:
    """Convert, configure and compile what is missing.

    Parameters
    ----------
    model : str or Path
        A compiled pair, a converted directory, a checkpoint, or ``smollm2``.
    quantization, kv_quantization : str, optional
        As on the command line; a converted directory knows its own. A checkpoint whose weights are codes
        (GGUF, AWQ, GPTQ) keeps them, with an int4 cache; any other becomes ``q4f16kv``.
    context_window_size, prefill_chunk_size, max_batch_size : int, optional
        What the library must allow; it may allow more, so that other limits need no other library.
    opt : str, optional
        ``O0`` .. ``O3``; ``O2`` by default.
    activations : str, optional
        As of :func:`~kvq.compiler.compile_model`.
    model_lib : str or Path, optional
        A library to use instead of compiling one.
    cache_dir : Path, optional
        Where to keep what is made, :func:`~kvq.cache_dir.default_cache_dir` by default.

    Raises
    ------
    KvqError
        If the model, what is asked of it, or the cache directory does not serve.
    """
    if quantization is not None or kv_quantization is not None:
        resolve(quantization or DEFAULT_QUANTIZATION, kv_quantization)
    path = resolve_model(model)
    if path.name == CHAT_CONFIG_NAME:
        path = path.parent
    limits = {
        "context_window_size": context_window_size,
        "prefill_chunk_size": prefill_chunk_size,
        "max_batch_size": max_batch_size,
    }
    library = Path(model_lib) if model_lib is not None else None
    if library is not None and not library.is_file():
        raise LibraryError(f"{library}: no such library: run kvq compile first")
    builder = _Builder(
        cache_dir or default_cache_dir(), device, opt, activations, limits, report or (lambda _: None)
    )
    if (path / CHAT_CONFIG_NAME).is_file():
        return builder.from_converted(path, quantization, kv_quantization, library)
    return builder.from_checkpoint(path, quantization, kv_quantization, library)


@dataclass(frozen=True)
class _Builder:
    cache_dir: Path
    device: str
    opt: str | None
    activations: str | None
    limits: dict[str, int | None]
    report: Report

    def from_converted(
        self, path: Path, quantization: str | None, kv_quantization: str | None, library: Path | None
    ) -> BuiltModel:
        """A converted directory: use its library if it is the one that is asked for, or compile one."""
        config = ChatConfig.load(path)
        if quantization is None:
            quantization = config.quantization
            kv_quantization = kv_quantization or config.kv_quantization
        weights, kv = resolve(quantization, kv_quantization)
        if weights.name != config.quantization:
            raise ConfigError(
                f"{path}: its weights are {config.quantization}, not {weights.name}: "
                "convert the checkpoint again"
            )
        if library is not None:
            return BuiltModel(path, path, library)
        asked = self._beyond({name: getattr(config, name) for name in self.limits})
        compiles = self.opt is not None or self.activations is not None or bool(asked)
        as_it_is = str(kv) == config.kv_quantization and not compiles
        found = sorted(path.glob("*.so"))
        if as_it_is and len(found) > 1:
            raise LibraryError(f"{path}: has {len(found)} libraries: choose one with --model-lib")
        if as_it_is and found:
            return BuiltModel(path, path, found[0])
        config = config.model_copy(update={"kv_quantization": str(kv), **asked})
        config.prefill_chunk_size = min(config.prefill_chunk_size, config.context_window_size)
        text = (path / CHAT_CONFIG_NAME).read_bytes()
        root = self.cache_dir / "models" / hashlib.sha256(text).hexdigest()[:16]
        entry = root / self._key(weights.name, str(kv), config.model_dump(mode="json"))

        def build(directory: Path) -> None:
            for name in config.tokenizer_files:
                shutil.copyfile(path / name, directory / name)
            config.save(directory)
            self._compile(directory, str(kv))

        self._make(entry, build)
        return BuiltModel(entry, path, entry / LIBRARY_NAME)

    def from_checkpoint(
        self, path: Path, quantization: str | None, kv_quantization: str | None, library: Path | None
    ) -> BuiltModel:
        """A checkpoint: convert, configure and compile it, each only if that has not been done before."""
        from kvq.convert import convert_weight
        from kvq.gen_config import DEFAULT_BATCH, DEFAULT_PREFILL_CHUNK, gen_config
        from kvq.loader.checkpoint import open_checkpoint
        from kvq.loader.source import resolve_for

        with open_checkpoint(path) as checkpoint:
            weights, kv = resolve_for(checkpoint, quantization, kv_quantization)
            fingerprint = checkpoint.fingerprint()
            limits = self._beyond(
                {
                    "context_window_size": checkpoint.config.max_position_embeddings,
                    "prefill_chunk_size": DEFAULT_PREFILL_CHUNK,
                    "max_batch_size": DEFAULT_BATCH,
                }
            )
        root = self.cache_dir / "models" / fingerprint[:16]
        converted = root / f"{weights.name}-{__version__}-{_source_digest()}"

        def convert(directory: Path) -> None:
            def progress(done: int, total: int, _name: str) -> None:
                self.report(f"converting weights to {weights.name}: {done * 100 // total}%")

            convert_weight(path, weights.name, directory, progress=progress)

        self._make(converted, convert)
        more = [limits, library is None]
        entry = root / self._key(weights.name, str(kv), more)

        def build(directory: Path) -> None:
            gen_config(
                path,
                weights.name,
                directory,
                kv_quantization=str(kv),
                context_window_size=limits.get("context_window_size"),
                prefill_chunk_size=limits.get("prefill_chunk_size"),
                max_batch_size=limits.get("max_batch_size"),
            )
            if library is None:
                self._compile(directory, str(kv))

        self._make(entry, build)
        return BuiltModel(entry, converted, library or entry / LIBRARY_NAME)

    def _beyond(self, allowed: dict[str, int]) -> dict[str, int]:
        """The limits that are asked for and that are more than what is allowed anyway."""
        return {
            name: value for name, value in self.limits.items() if value is not None and value > allowed[name]
        }

    def _compile(self, directory: Path, kv: str) -> None:
        from kvq.compiler import compile_model

        self.report(f"compiling for {self.device} with a KV cache in {kv}")
        compile_model(
            directory / CHAT_CONFIG_NAME,
            directory / LIBRARY_NAME,
            device=self.device,
            opt=self.opt or DEFAULT_OPT,
            activations=self.activations or DEFAULT_ACTIVATIONS,
        )

    def _key(self, weights: str, kv: str, more: Any) -> str:
        """Name of a directory: the schemes to read, and a hash of everything a library depends on."""
        content = {
            "kvq": [__version__, _source_digest()],
            "tvm": version("apache-tvm"),
            "device": self.device,
            "machine": [platform.system(), platform.machine(), *self._features()],
            "opt": self.opt or DEFAULT_OPT,
            "activations": self.activations or DEFAULT_ACTIVATIONS,
            "more": more,
        }
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return f"{weights}-{kv.replace('=', '').replace(':', '-')}-{digest[:12]}"

    def _features(self) -> list[str]:
        """What a library is compiled for."""
        if self.device == "cuda":
            return list(cuda_archs())
        return sorted(detect()) if self.device == "cpu" else []

    def _make(self, entry: Path, build: Callable[[Path], None]) -> None:
        """Build a directory unless it is there; under a lock, and visible only when it is whole."""
        if entry.is_dir():
            return
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            with _locked(entry.parent / f".{entry.name}.lock", self.report):
                if entry.is_dir():
                    return
                for stale in entry.parent.glob(f".{entry.name}.*.tmp"):
                    shutil.rmtree(stale, ignore_errors=True)  # of a process that was killed
                temporary = entry.parent / f".{entry.name}.{os.getpid()}.tmp"
                temporary.mkdir()
                try:
                    build(temporary)
                    os.rename(temporary, entry)
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
        except OSError as problem:
            raise ConfigError(
                f"{entry.parent}: cannot be written: {problem.strerror}: "
                "set KVQ_CACHE to a directory that can"
            ) from None


@cache
def _source_digest() -> str:
    """Hash of the code that makes weights and libraries, so that a changed checkout uses nothing stale."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for name in _SOURCES:
        path = root / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


@contextlib.contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """Hold an exclusive lock on a file, which stays; the system drops it if the process dies."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that is building the same model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
