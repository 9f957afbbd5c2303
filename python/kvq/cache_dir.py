"""Where kvq keeps what it downloaded or built."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """``$KVQ_CACHE``, else ``$XDG_CACHE_HOME/kvq``, else ``~/.cache/kvq``; not created here."""
    if own := os.environ.get("KVQ_CACHE"):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "kvq"
    return Path.home() / ".cache" / "kvq"
