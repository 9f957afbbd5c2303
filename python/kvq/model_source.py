"""Names of models that kvq knows how to fetch."""

from __future__ import annotations

from pathlib import Path

from kvq.cache_dir import default_cache_dir
from kvq.demo_model import DEMO_NAME, fetch_demo_model
from kvq.hub import fetch, is_hub_name


def resolve_model(name: str | Path) -> Path:
    """The path of a model; ``smollm2`` (the demo) and ``HF://org/name`` are fetched, all else is a path.

    A file or directory of that name in the working directory comes first.

    Raises
    ------
    CheckpointError
        If a model cannot be fetched.
    """
    if is_hub_name(name):
        return fetch(str(name))
    path = Path(name)
    if str(name) == DEMO_NAME and not path.exists():
        return fetch_demo_model(default_cache_dir())
    return path
