"""Converted weights: fusion, casts, and conversions that fail half-way."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from checkpoints import DTYPES, edit_json, write_json, write_shards, write_tiny_llama
from kvq.convert import convert_weight
from kvq.errors import CheckpointError, ConfigError, KvqError
from kvq.loader import TensorCache, open_checkpoint
from kvq.loader.tensor_cache import _Shard
from kvq.quantization.scheme import WEIGHT_SCHEMES
from kvq.quantization.weights import quantize_q4f16_1, stored_parameters
from tiny_llama import TinyLlama


def fused(tiny: TinyLlama, name: str) -> np.ndarray:
    """A parameter put together from the tensors of the checkpoint, in float32."""
    for whole, parts in (
        ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("gate_up_proj", ("gate_proj", "up_proj")),
    ):
        if whole in name:
            return np.concatenate([tiny.tensor(name.replace(whole, part)) for part in parts])
    return tiny.tensor(name)


# ---- the whole conversion --------------------------------------------------------------------------
@pytest.mark.parametrize("fmt", ["safetensors", "bin", "gguf"])
@pytest.mark.parametrize("quantization", ["q0f32", "q0f16", "q4f16_1"])
@pytest.mark.parametrize(("dtype", "tied", "bias"), [("float32", True, False), ("bfloat16", False, True)])
def test_conversion_matrix(
    tmp_path: Path, fmt: str, quantization: str, dtype: str, tied: bool, bias: bool
) -> None:
    tiny = TinyLlama(seed=4, tied=tied, bias=bias)
    path = write_tiny_llama(tmp_path / "in", seed=4, tied=tied, bias=bias, dtype=dtype, shards=2, fmt=fmt)
    num_bytes = convert_weight(path, quantization, tmp_path / "out")
    cache = TensorCache(tmp_path / "out")
    cache.verify()
    with open_checkpoint(path) as checkpoint:
        stored = stored_parameters(checkpoint.config, WEIGHT_SCHEMES[quantization])
    assert [(t.name, t.shape, t.dtype) for t in stored] == [(n, *cache.describe(n)) for n in cache.names]
    assert num_bytes == cache.nbytes == sum(cache.read(name).nbytes for name in cache.names)
    for name in cache.names:
        if name.endswith("q_scale"):
            continue
        want = fused(tiny, name.replace("q_weight", "weight"))
        if not (fmt == "gguf" and want.ndim == 1):
            want = want.astype(DTYPES[dtype]).astype(np.float32)
        read = cache.read(name)
        if name.endswith("q_weight"):
            codes, scale = quantize_q4f16_1(want)
            np.testing.assert_array_equal(read, codes)
            np.testing.assert_array_equal(cache.read(name.replace("q_weight", "q_scale")), scale)
        else:
            np.testing.assert_array_equal(read, want.astype(read.dtype), err_msg=name)


def test_alias_has_the_weights_of_its_scheme(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "in")
    convert_weight(path, "q4f16kv", tmp_path / "a")
    convert_weight(path, "q4f16_1", tmp_path / "b")
    assert (tmp_path / "a" / "params_shard_0.bin").read_bytes() == (
        tmp_path / "b" / "params_shard_0.bin"
    ).read_bytes()


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    convert_weight(
        write_tiny_llama(tmp_path / "in"), "q0f16", tmp_path / "out", progress=lambda *a: seen.append(a)
    )
    assert [done for done, _, _ in seen] == list(range(1, seen[0][1] + 1))
    assert seen[-1][2] == "model.norm.weight"


def test_memory_stays_near_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_llama(
        tmp_path / "in", hidden_size=512, vocab_size=2048, num_layers=12, dtype="bfloat16"
    )
    monkeypatch.setattr("kvq.convert._BLOCK_VALUES", 1 << 14)
    largest = 2048 * 512 * 2
    whole = (path / "model.safetensors").stat().st_size
    assert whole > 8 * largest
    tracemalloc.start()
    try:
        convert_weight(path, "q0f16", tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * largest


@pytest.mark.parametrize(
    ("quantization", "value", "expected"),
    [
        ("q0f16", np.inf, "q_proj.weight holds NaN, infinity or a value beyond the range of float16"),
        ("q0f16", 1e6, "use q0f32"),
        ("q4f16_1", np.nan, "q_proj.weight: holds NaN"),
        ("q0f32", np.nan, "beyond the range of float32"),
    ],
)
def test_values_that_no_scheme_can_hold(
    tmp_path: Path, quantization: str, value: float, expected: str
) -> None:
    tensors = TinyLlama(seed=1).tensors()
    tensors["model.layers.1.self_attn.q_proj.weight"][5, 6] = value
    write_json(tmp_path / "config.json", TinyLlama(seed=1).config())
    write_shards(tmp_path, tensors, 1, "safetensors")
    with pytest.raises(KvqError) as error:
        convert_weight(tmp_path, quantization, tmp_path / "out")
    assert expected in str(error.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_large_bfloat16_values_fit_float32_only(tmp_path: Path) -> None:
    tensors = {name: t.astype(ml_dtypes.bfloat16) for name, t in TinyLlama(seed=1).tensors().items()}
    tensors["model.norm.weight"][3] = 1e6
    write_json(tmp_path / "config.json", TinyLlama(seed=1).config())
    write_shards(tmp_path, tensors, 1, "safetensors")
    convert_weight(tmp_path, "q0f32", tmp_path / "out")
    assert TensorCache(tmp_path / "out").read("model.norm.weight")[3] == tensors["model.norm.weight"][3]


def test_rows_that_are_no_whole_groups(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "in", hidden_size=200)
    with pytest.raises(ConfigError, match=r"model.embed_tokens.weight: 200 input channels .* use q0f16"):
        convert_weight(path, "q4f16_1", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    convert_weight(path, "q0f16", tmp_path / "out")


# ---- failures ----------------------------------------------------------------------------------------
def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_an_interrupted_conversion_leaves_the_earlier_one(tmp_path: Path) -> None:
    convert_weight(write_tiny_llama(tmp_path / "a", seed=1), "q0f16", tmp_path / "out")
    before = content(tmp_path / "out")

    def interrupt(done: int, total: int, name: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_weight(
            write_tiny_llama(tmp_path / "b", seed=2), "q0f32", tmp_path / "out", progress=interrupt
        )
    assert content(tmp_path / "out") == before


def test_a_refused_checkpoint_leaves_the_earlier_output(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "in", seed=1)
    convert_weight(path, "q0f16", tmp_path / "out")
    before = content(tmp_path / "out")
    edit_json(path / "config.json", num_hidden_layers=5)
    with pytest.raises(CheckpointError):
        convert_weight(path, "q0f16", tmp_path / "out")
    assert content(tmp_path / "out") == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_llama(tmp_path / "in")

    class FullDisk(_Shard):
        def __init__(self, path: Path) -> None:
            super().__init__(Path("/dev/full"))

    monkeypatch.setattr("kvq.loader.tensor_cache._Shard", FullDisk)
    with pytest.raises(CheckpointError, match=r"out: cannot be written: No space left on device$"):
        convert_weight(path, "q0f16", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_output_that_is_a_file(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "in")
    (tmp_path / "out").write_text("precious")
    with pytest.raises(CheckpointError, match="out: cannot be written: "):
        convert_weight(path, "q0f16", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "precious"


def test_unknown_scheme(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown --quantization 'q5': use one of q0f32, q0f16"):
        convert_weight(write_tiny_llama(tmp_path / "in"), "q5", tmp_path / "out")
