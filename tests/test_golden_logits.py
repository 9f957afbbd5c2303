"""Logits of compiled models against those that transformers computed (``scripts/make_goldens.py``)."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from golden_run import TOLERANCE, run
from kvq.build import prepare_model
from kvq.runtime.loaded_model import LoadedModel, load_model
from tiny_llama import GOLDEN_CASES

GOLDENS = Path(__file__).parent / "goldens"


def build(
    checkpoint: Path, quantization: str, kv: str, cache: Path, context: int = 512, device: str = "cpu"
) -> LoadedModel:
    """Convert, configure, compile and load a checkpoint, with exact activations."""
    limits = {"context_window_size": context, "prefill_chunk_size": context, "max_batch_size": 2}
    built = prepare_model(checkpoint, quantization, kv, **limits, opt="O1", device=device, cache_dir=cache)
    return load_model(built.library, built.weights_dir, device=device, **limits)


@pytest.fixture(scope="module")
def tiny(build_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    """Compiled tiny models by name, made when they are first asked for."""
    root = tmp_path_factory.mktemp("tiny")

    class Models(dict[str, LoadedModel]):
        def __missing__(self, key: str) -> LoadedModel:
            name, kv = key.split("/")
            directory = root / name
            if not directory.exists():
                GOLDEN_CASES[name].write(directory)
            self[key] = build(directory, "q0f32", kv, build_cache)
            return self[key]

    return Models()


@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_tiny_models(name: str, tiny: dict[str, LoadedModel]) -> None:
    golden = np.load(GOLDENS / f"tiny_{name}.npz")
    for chunks in ([150], [37, 1, 1, 64]):
        found = run(tiny[f"{name}/none"], golden["tokens"], chunks)[golden["rows"]]
        assert np.abs(found - golden["logits"]).max() < TOLERANCE


@pytest.mark.parametrize("kv", ["none", "int8", "int4", "int3", "k=int4:v=int2"])
@pytest.mark.parametrize("name", ["gqa3_d64_untied", "gqa8_d80_tied_bias"])
def test_any_chunking_gives_the_same_bits(name: str, kv: str, tiny: dict[str, LoadedModel]) -> None:
    tokens = GOLDEN_CASES[name].prompt(150)
    model = tiny[f"{name}/{kv}"]
    whole = run(model, tokens, [150])
    for chunks in ([1], [7], [64], [16, 100, 1]):
        assert np.array_equal(run(model, tokens, chunks), whole)


def assert_ordered(errors: dict[str, float]) -> None:
    """Each scheme is clearly better than the one before it."""
    values = list(errors.values())
    assert all(coarse > 1.3 * fine for coarse, fine in itertools.pairwise(values)), errors


@pytest.mark.parametrize("name", ["gqa3_d64_untied", "gqa8_d128_tied"])
def test_fewer_bits_give_larger_errors(name: str, tiny: dict[str, LoadedModel]) -> None:
    golden = np.load(GOLDENS / f"tiny_{name}.npz")
    after = golden["rows"] >= 64  # a query of the first page reads no codes
    errors = {}
    for kv in ("int3", "int4", "int8", "none"):
        found = run(tiny[f"{name}/{kv}"], golden["tokens"], [150])[golden["rows"]]
        errors[kv] = float(np.sqrt(np.square(found - golden["logits"])[after].mean()))
    assert_ordered(errors)


@pytest.mark.slow
def test_smollm2(demo_gguf: Path, build_cache: Path) -> None:
    golden = np.load(GOLDENS / "smollm2.npz")
    model = build(demo_gguf, "q0f32", "none", build_cache)
    for i, chunks in enumerate(([20], [1, 64], [100, 1, 1])):
        found = run(model, golden[f"tokens_{i}"], chunks)
        assert np.abs(found[-1] - golden[f"last_{i}"]).max() < TOLERANCE
        top = np.take_along_axis(found, golden[f"top_ids_{i}"], axis=1)
        assert np.abs(top - golden[f"top_logits_{i}"]).max() < TOLERANCE
        sample = found[:, golden["sample_ids"]]
        assert np.abs(sample - golden[f"sample_logits_{i}"]).max() < TOLERANCE
        best = golden[f"top_logits_{i}"]
        clear = best[:, 0] - best[:, 1] > 2 * TOLERANCE
        assert clear.mean() > 0.9
        assert np.array_equal(found.argmax(axis=1)[clear], golden[f"top_ids_{i}"][clear, 0])


@pytest.mark.slow
def test_smollm2_errors_are_ordered(demo_gguf: Path, build_cache: Path) -> None:
    golden = np.load(GOLDENS / "smollm2.npz")
    tokens, sample = golden["tokens_2"], golden["sample_ids"]
    errors = {}
    for kv in ("int3", "int4", "none"):
        found = run(build(demo_gguf, "q0f32", kv, build_cache), tokens, [128])
        difference = (found[:, sample] - golden["sample_logits_2"])[64:]
        errors[kv] = float(np.sqrt(np.square(difference).mean()))
    assert_ordered(errors)
