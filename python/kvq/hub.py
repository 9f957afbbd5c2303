"""Checkpoints of the Hugging Face hub, by ``HF://org/name``: only the files that kvq reads are fetched.

The client ``huggingface_hub`` (extra ``hub``) keeps them in its own cache, continues a download that was
interrupted, and asks for changes only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvq.errors import CheckpointError, KvqError
from kvq.loader.chat_source import TOKENIZER_FILES

PREFIX = "HF://"
_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+?))?(?:/(?P<file>[\w./-]+\.gguf))?")
#: What a model has beside its weights and tokenizer.
_SETTINGS = ("config.json", "generation_config.json")
#: Weights, the best kind first; those of other frameworks and copies in other layouts are left out.
_WEIGHTS = (
    re.compile(r"(?!consolidated).*\.safetensors(\.index\.json)?"),
    re.compile(r"pytorch_model.*\.bin(\.index\.json)?"),
)


def is_hub_name(name: str | Path) -> bool:
    """Whether a model is named by the hub."""
    return str(name).upper().startswith(PREFIX)


def fetch(name: str) -> Path:
    """Fetch a model: ``HF://org/name``, ``HF://org/name@revision``, or with ``/file.gguf`` behind it.

    Returns
    -------
    Path
        The directory of the model, or the GGUF file.

    Raises
    ------
    CheckpointError
        If the name is none, the client is not installed, the hub cannot be reached or refuses.
    """
    match = _NAME.fullmatch(name[len(PREFIX) :])
    if match is None:
        raise CheckpointError(
            f"{name}: not a model of the hub: use HF://org/name, HF://org/name@revision or HF://org/name/file.gguf"
        )
    try:
        import huggingface_hub as hub
    except ImportError:
        raise CheckpointError(
            f"{name}: huggingface_hub is not installed: pip install 'kvq[hub]', or give a local directory"
        ) from None
    repo, revision, file = match["repo"], match["revision"], match["file"]
    try:
        return _fetch(hub, repo, revision, file)
    except KvqError:
        raise
    except Exception as problem:  # of the client, of HTTP, of the file system
        found = _cached(hub, repo, revision, file)
        if found is not None:
            return found
        raise CheckpointError(f"{name}: {_reason(problem)}") from None


def _fetch(hub: Any, repo: str, revision: str | None, file: str | None) -> Path:
    names = hub.HfApi().list_repo_files(repo, revision=revision)
    wanted = [file] if file else choose_files(names)
    if file and file not in names:
        raise CheckpointError(f"{PREFIX}{repo}: has no file {file}: it has {_list_gguf(names)}")
    if not wanted:
        raise CheckpointError(
            f"{PREFIX}{repo}: has neither config.json with weights nor one GGUF file: "
            f"it has {_list_gguf(names)}"
        )
    directory = Path(hub.snapshot_download(repo, revision=revision, allow_patterns=wanted))
    chosen = [name for name in wanted if name.endswith(".gguf")]
    return directory / chosen[0] if chosen else directory


def choose_files(names: Sequence[str]) -> list[str]:
    """The files of a repository that kvq reads; its only GGUF file where it has no other weights.

    Parameters
    ----------
    names : sequence of str
        All its files.

    Returns
    -------
    list of str
        Empty if there is nothing to read, or if several GGUF files leave the choice open.
    """
    if "config.json" in names:
        for pattern in _WEIGHTS:
            weights = [name for name in names if pattern.fullmatch(name) and "/" not in name]
            if weights:
                known = (*_SETTINGS, *TOKENIZER_FILES)
                return sorted(weights + [name for name in names if name in known or _is_tiktoken(name)])
    found = [name for name in names if name.endswith(".gguf")]
    return found if len(found) == 1 else []


def _is_tiktoken(name: str) -> bool:
    return name.endswith(".tiktoken") and "/" not in name


def _list_gguf(names: Sequence[str]) -> str:
    found = [name for name in names if name.endswith(".gguf")]
    shown = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
    return f"the GGUF files {shown}: name one behind the model" if found else "no GGUF file"


def _cached(hub: Any, repo: str, revision: str | None, file: str | None) -> Path | None:
    """What an earlier download left, where the hub cannot be reached; None if that is not whole."""
    try:
        directory = Path(hub.snapshot_download(repo, revision=revision, local_files_only=True))
    except Exception:  # nothing is there
        return None
    names = [str(path.relative_to(directory)) for path in directory.rglob("*") if path.exists()]
    wanted = [file] if file else choose_files(names)
    if not wanted or not all((directory / name).is_file() for name in wanted):
        return None
    return directory / wanted[0] if wanted[0].endswith(".gguf") else directory


def _reason(problem: Exception) -> str:
    """Why the hub gave nothing, in one line, with what would help."""
    kinds = {kind.__name__ for kind in type(problem).__mro__}
    if "GatedRepoError" in kinds:
        return "its licence has to be accepted on the hub first: do so, then run hf auth login"
    if "RepositoryNotFoundError" in kinds:
        return "the hub has no such model, or it is private: check the name, or run hf auth login"
    if "RevisionNotFoundError" in kinds:
        return "the hub has no such revision of it"
    if isinstance(problem, OSError) and problem.errno is not None:
        return f"cannot be stored: {problem.strerror}"
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    return f"the hub cannot be reached ({' '.join(lines[0].split())[:200]}): give a local directory instead"
