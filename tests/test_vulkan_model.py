"""A whole model on a Vulkan device: the CPU's logits, and its refusals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import vulkan_runner
from checkpoints import write_tiny_llama
from kvq.build import BuiltModel, prepare_model
from kvq.errors import LibraryError
from kvq.runtime.library import Library
from kvq.runtime.loaded_model import LoadedModel, load_model

pytestmark = [
    pytest.mark.vulkan,
    pytest.mark.skipif(vulkan_runner.missing() is not None, reason=str(vulkan_runner.missing())),
]

LIMITS = {"context_window_size": 256, "prefill_chunk_size": 96, "max_batch_size": 2}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, build_cache: Path) -> dict[str, BuiltModel]:
    """A tiny model for both devices, with exact activations and a cache in int4."""
    checkpoint = write_tiny_llama(tmp_path_factory.mktemp("tiny"), vocab_size=264)
    return {
        device: prepare_model(
            checkpoint, "q4f16_1", "int4", device=device, opt="O1", cache_dir=build_cache, **LIMITS
        )
        for device in ("cpu", "vulkan")
    }


def logits(model: LoadedModel) -> tuple[list[np.ndarray], int]:
    """Prefill in chunks, two sequences in a step, decode across a page end; then the likeliest token."""
    ids = np.random.default_rng(0).integers(0, 264, 200).tolist()
    for name in ("a", "b"):
        model.cache.add_sequence(name)
    out = [model.step([("a", 90)], ids[:90]).copy()]
    out.append(model.step([("a", 36), ("b", 20)], ids[90:146]).copy())
    for i in range(150, 156):
        out.append(model.step([("a", 1), ("b", 1)], ids[i : i + 2]).copy())
    return out, int(model.likeliest([("a", 1)], [5])[0])


def test_logits_are_those_of_the_cpu(built: dict[str, BuiltModel]) -> None:
    results = {
        device: logits(load_model(model.library, model.weights_dir, device=device, **LIMITS))
        for device, model in built.items()
    }
    for expected, found in zip(results["cpu"][0], results["vulkan"][0], strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.abs(expected).max())
    assert results["vulkan"][1] == results["cpu"][1]


def test_a_library_is_of_one_device(built: dict[str, BuiltModel]) -> None:
    with pytest.raises(LibraryError, match="was compiled for vulkan, not cpu: use --device vulkan"):
        Library.load(built["vulkan"].library, "cpu")
    with pytest.raises(LibraryError, match="was compiled for cpu, not vulkan"):
        Library.load(built["cpu"].library, "vulkan")


def run(code: str, *arguments: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **settings}, check=False
    )


_LOAD = """
import sys
from kvq.runtime.library import Library
Library.load(sys.argv[1], "vulkan").load_params(sys.argv[2])
"""


def test_a_weight_beyond_the_devices_limit(built: dict[str, BuiltModel]) -> None:
    """It is named, with the limit."""
    model = built["vulkan"]
    done = run(_LOAD, model.library, model.weights_dir, KVQ_VULKAN_LIMITS="buffer_bytes=4096")
    last = done.stderr.strip().splitlines()[-1]
    assert "cannot be loaded: vulkan:0 (" in last
    assert last.endswith("takes buffers of at most 4096 bytes (maxStorageBufferRange), not 25344"), last


_LOSE = """
import sys
import tvm_ffi
from kvq.engine import Engine
engine = Engine(sys.argv[1], model_lib=sys.argv[2], device="vulkan")
for _ in range(3):
    try:
        answer = engine.chat.completions.create(messages=[{"role": "user", "content": "Hi"}], max_tokens=3)
        print("answered", answer.usage.completion_tokens)
    except Exception as error:
        print("refused", error)
    tvm_ffi.get_global_func("kvq_vulkan.lose_device")(0)
print("alive")
"""


def test_a_lost_device_ends_requests_alone(built: dict[str, BuiltModel], tmp_path: Path) -> None:
    """Every request from then on gets one line; the process goes on."""
    model = built["vulkan"]
    for source in (model.config_dir, model.weights_dir):
        shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    done = run(_LOSE, tmp_path, model.library)
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and lines[0].startswith("answered") and lines[3] == "alive", done.stderr
    assert all(line.startswith("refused") and "was lost" in line for line in lines[1:3]), lines
