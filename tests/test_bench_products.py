"""``kvq bench products``: what counts as a product, what it reads, and how times become figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import write_tiny_llama
from kvq.bench.products import ALL, LAUNCHES, product_figures
from kvq.bench.step_kernels import StepKernel, record_step
from kvq.build import prepare_model
from kvq.cli.main import main
from kvq.errors import ConfigError
from kvq.runtime.library import nbytes
from kvq.runtime.loaded_model import LoadedModel, load_model

PRODUCTS = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


@pytest.fixture(scope="module")
def model(build_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    # as tests of the engine have it, so that a run builds it once
    checkpoint = write_tiny_llama(tmp_path_factory.mktemp("tiny"), vocab_size=264)
    built = prepare_model(checkpoint, "q4f16kv", cache_dir=build_cache)
    limits = {"context_window_size": 64, "prefill_chunk_size": 8, "max_batch_size": 3}
    return load_model(built.library, built.weights_dir, **limits)


def test_a_step_is_recorded_kernel_by_kernel(model: LoadedModel) -> None:
    kernels = record_step(model, 3)
    products = [kernel for kernel in kernels if kernel.weight]
    layers = model.metadata.model.num_hidden_layers
    assert [kernel.weight for kernel in products] == PRODUCTS * layers + ["embed_tokens"]
    assert {kernel.shape for kernel in products if kernel.weight == "down_proj"} == {(192, 224)}
    assert {kernel.name.split("_")[0] for kernel in kernels if not kernel.weight} == {
        *("embedding", "rms", "rope", "quantize", "silu")
    }, "and none of the cache's"
    matrices = [
        nbytes(tensor)
        for tensor, spec in zip(model.params.handle, model.metadata.params, strict=True)
        if len(spec.shape) > 1
    ]
    assert sum(kernel.weight_bytes for kernel in products) == sum(matrices)
    assert not model.cache.sequence_ids


def test_a_recorded_kernel_computes_the_same_again(model: LoadedModel) -> None:
    last = record_step(model, 2)[-1]
    logits = np.from_dlpack(last.arguments[-1])
    expected = logits.copy()
    logits[:] = np.nan
    last.launch()
    np.testing.assert_array_equal(logits, expected)


def test_more_rows_than_the_library_has_are_refused(model: LoadedModel) -> None:
    most = model.metadata.max_batch_size
    with pytest.raises(ConfigError, match=f"--rows {most + 1} exceeds the {most} sequences"):
        record_step(model, most + 1)


def fake_step() -> list[StepKernel]:
    """Two layers of a norm and a product, then another product."""

    def nothing() -> None: ...

    layer = [
        StepKernel("norm", None, (), 0, nothing),
        StepKernel("linear_8x4", "o_proj", (8, 4), 6000, nothing),
    ]
    return [*layer, *layer, StepKernel("linear_9x4", "lm_head", (9, 4), 3000, nothing)]


def test_figures() -> None:
    """A product takes 3 us alone and 2 in the step, where a part is hidden; the head takes 4, a norm 1."""
    alone = {"norm": 1e-6, "linear_8x4": 3e-6, "linear_9x4": 4e-6}
    measured = []

    def seconds(kernels: Sequence[StepKernel]) -> float:
        names = [kernel.name for kernel in kernels]
        measured.append(names)
        hidden = 1e-6 * names.count("linear_8x4") if "norm" in names else 0
        return sum(alone[name] for name in names) - hidden

    product, head, whole = product_figures(7, fake_step(), 3e9, seconds)
    assert (product.rows, product.weight, product.outputs, product.inputs) == (7, "o_proj", 8, 4)
    assert (product.launches, head.launches, whole.launches) == (2, 1, 5)
    assert (product.us, product.us_in_step) == (pytest.approx(3), pytest.approx(2))
    assert (product.of_copy, product.of_copy_in_step) == (pytest.approx(2 / 3), pytest.approx(1))
    assert (head.us, head.us_in_step) == (pytest.approx(4), pytest.approx(4))
    assert (whole.weight, whole.us, whole.us_in_step) == (ALL, None, pytest.approx(10))
    assert whole.of_copy_in_step == pytest.approx(5e-6 / 10e-6)
    assert ["linear_8x4"] * LAUNCHES in measured and ["linear_9x4"] * LAUNCHES in measured


def test_libraries_are_compiled_for_what_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Libraries of other activations lie beside each other, and are found by the same option."""
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path / "cache"))
    asked: list[Any] = []
    monkeypatch.setattr("kvq.compiler.compile_model", lambda *_, **options: asked.append(options))
    words = ["bench", "products", "llama-3-8b", "--random-weights", "--libraries", str(tmp_path)]
    for options in ([], ["--activations", "bfloat16"]):
        assert main([*words, *options, "--compile-only", "--cuda-arch", "sm_90a"]) == 0
    names = [Path(line).name for line in capsys.readouterr().out.split()]
    assert names == ["llama-3-8b-q4f16_1-int4.so", "llama-3-8b-q4f16_1-int4-bfloat16.so"]
    assert [(options["activations"], options["cuda_arch"]) for options in asked] == [
        ("auto", "sm_90a"),
        ("bfloat16", "sm_90a"),
    ]
    assert main([*words, "--cuda-arch", "sm_90a"]) == 2
    assert "--cuda-arch goes with --compile-only" in capsys.readouterr().err
