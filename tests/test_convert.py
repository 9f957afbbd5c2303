"""Converted weights: fusion, casts, q4f16_1, the shards on disk, and conversions that fail half-way."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import DTYPES, edit_json, write_json, write_shards, write_tiny_llama
from kvq.convert import convert_weight
from kvq.errors import CheckpointError, ConfigError, KvqError
from kvq.loader import TensorCache, TensorCacheWriter, open_checkpoint
from kvq.loader.tensor_cache import _Shard
from kvq.quantization.scheme import WEIGHT_SCHEMES
from kvq.quantization.weights import dequantize_q4f16_1, quantize_q4f16_1, stored_parameters
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


# ---- q4f16_1 -----------------------------------------------------------------------------------------
def test_bits_of_q4f16_1() -> None:
    weight = np.arange(-7, 9, dtype=np.float32).repeat(2)[None] * 0.5
    codes, scale = quantize_q4f16_1(weight)
    assert codes.dtype == np.uint32 and codes.shape == (1, 4)
    assert scale.dtype == np.float16 and scale.tolist() == [[0.5]]
    assert codes[0].tolist() == [0x33221100, 0x77665544, 0xBBAA9988, 0xFFEEDDCC]
    np.testing.assert_array_equal(dequantize_q4f16_1(codes, scale), weight)
    # The mirror image has the same codes: the scale takes the sign.
    mirrored = quantize_q4f16_1(-weight)
    np.testing.assert_array_equal(mirrored[0], codes)
    assert mirrored[1].tolist() == [[-0.5]]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.floats(-12, 3), st.sampled_from([np.float32, np.float16]))
def test_error_of_q4f16_1(seed: int, exponent: float, dtype: type) -> None:
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((3, 96)) * 2.0**exponent * rng.choice([0.1, 1, 10], (3, 96))).astype(dtype)
    codes, scale = quantize_q4f16_1(weight)
    assert np.isfinite(scale).all() and (scale != 0).all()
    step = np.abs(scale.astype(np.float32)).repeat(32, axis=1)
    error = np.abs(dequantize_q4f16_1(codes, scale) - weight)
    inside = np.abs(weight) <= 7 * step
    assert (error[inside] <= 0.501 * step[inside]).all()
    # Never worse than MLC-LLM's own choice, codes 0 .. 14 and max|w| / 7, but for the rounding of the scale.
    groups = weight.astype(np.float32).reshape(3, 3, 32)
    plain = (np.abs(groups).max(axis=2, keepdims=True) / 7).astype(np.float16).astype(np.float32)
    theirs = np.square(np.rint(groups / np.where(plain, plain, 1)) * plain - groups).sum()
    assert np.square(error).sum() <= 1.3 * theirs


def test_error_of_q4f16_1_on_common_weights() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 2048)).astype(np.float32)
    error = np.square(dequantize_q4f16_1(*quantize_q4f16_1(weight)) - weight).mean()
    groups = weight.reshape(-1, 32)
    plain = np.abs(groups).max(axis=1, keepdims=True) / 7
    assert error < 0.78 * np.square(np.rint(groups / plain) * plain - groups).mean()


def test_degenerate_groups_of_q4f16_1() -> None:
    weight = np.zeros((4, 32), np.float32)
    weight[1] = 3.7
    weight[2, 5] = 1e-12
    weight[3] = 524000.0  # near eight times the largest fp16
    codes, scale = quantize_q4f16_1(weight)
    assert np.isfinite(scale).all() and (scale != 0).all()
    back = dequantize_q4f16_1(codes, scale)
    assert (back[0] == 0).all()
    np.testing.assert_allclose(back[1], 3.7, rtol=1e-3)
    assert np.abs(back[2]).max() < 1e-6
    np.testing.assert_allclose(back[3], 524000.0, rtol=1e-3)
    with pytest.raises(ConfigError, match="beyond the fp16 range"):
        quantize_q4f16_1(weight * 2)


# ---- shards on disk ----------------------------------------------------------------------------------
def write_cache(directory: Path, tensors: dict[str, np.ndarray], shard_bytes: int = 1000) -> TensorCache:
    with TensorCacheWriter(directory, shard_bytes) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish()
    return TensorCache(directory)


def some_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "a": rng.standard_normal((10, 10)).astype(np.float16),
        "b": rng.standard_normal(200).astype(np.float32),
        "large": rng.integers(0, 2**32, (50, 40), dtype=np.uint32),
        "c": rng.standard_normal(3).astype(np.float32),
    }


def test_tensor_cache_round_trip(tmp_path: Path) -> None:
    tensors = some_tensors()
    cache = write_cache(tmp_path, tensors)
    cache.verify()
    assert cache.names == list(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(cache.read(name), tensor)
        assert (
            isinstance(cache.read(name).base, np.memmap | np.ndarray) and not cache.read(name).flags.writeable
        )
    layout = json.loads((tmp_path / "tensor-cache.json").read_text())
    shards = {s["dataPath"]: [r["name"] for r in s["records"]] for s in layout["records"]}
    # No shard is above the limit but the one that holds a tensor alone.
    assert shards == {
        "params_shard_0.bin": ["a", "b"],
        "params_shard_1.bin": ["large"],
        "params_shard_2.bin": ["c"],
    }
    assert layout["metadata"]["ParamSize"] == 4
    assert layout["metadata"]["ParamBytes"] == sum(t.nbytes for t in tensors.values())


def test_a_smaller_output_leaves_no_stale_shards(tmp_path: Path) -> None:
    tensors = some_tensors()
    write_cache(tmp_path, tensors)
    write_cache(tmp_path, {"a": tensors["a"]})
    assert sorted(content(tmp_path)) == ["params_shard_0.bin", "tensor-cache.json"]


def test_the_old_name_is_read(tmp_path: Path) -> None:
    tensors = some_tensors()
    write_cache(tmp_path, tensors)
    (tmp_path / "tensor-cache.json").rename(tmp_path / "ndarray-cache.json")
    np.testing.assert_array_equal(TensorCache(tmp_path).read("b"), tensors["b"])


def test_bits_per_parameter(tmp_path: Path) -> None:
    convert_weight(write_tiny_llama(tmp_path / "in"), "q4f16_1", tmp_path / "out")
    metadata = json.loads((tmp_path / "out" / "tensor-cache.json").read_text())["metadata"]
    assert 4.5 < metadata["BitsPerParam"] < 4.6


def test_readable_by_tvm(tmp_path: Path) -> None:
    tvmjs = pytest.importorskip("tvm.contrib.tvmjs")
    tvm = pytest.importorskip("tvm")
    tensors = some_tensors()
    write_cache(tmp_path, tensors)
    loaded, metadata = tvmjs.load_tensor_cache(str(tmp_path), tvm.cpu())
    assert metadata["ParamSize"] == 4
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(loaded[name].numpy(), tensor)


def test_written_by_tvm(tmp_path: Path) -> None:
    tvmjs = pytest.importorskip("tvm.contrib.tvmjs")
    tensors = some_tensors()
    tvmjs.dump_tensor_cache(tensors, str(tmp_path), encode_format="raw", show_progress=False)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(TensorCache(tmp_path).read(name), tensor)
    tvmjs.dump_tensor_cache(tensors, str(tmp_path), encode_format="f32-to-bf16", show_progress=False)
    np.testing.assert_allclose(TensorCache(tmp_path).read("b"), tensors["b"], rtol=2**-8)


def test_damaged_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor-cache.json: run kvq convert_weight"):
        TensorCache(tmp_path)
    cache = write_cache(tmp_path, some_tensors())
    with pytest.raises(CheckpointError, match="tensor nothing is missing"):
        cache.read("nothing")
    shard = tmp_path / "params_shard_1.bin"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"params_shard_1.bin: its MD5 sum differs"):
        TensorCache(tmp_path).verify()
    shard.write_bytes(data[:-1])
    with pytest.raises(
        CheckpointError, match=r"params_shard_1.bin: has 7999 bytes, tensor-cache.json says 8000"
    ):
        TensorCache(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"params_shard_1.bin: this shard is named in .* missing"):
        TensorCache(tmp_path)
    (tmp_path / "tensor-cache.json").write_text('{"records": [{"dataPath": "params_shard_0.bin"}]}')
    with pytest.raises(CheckpointError, match="not a table of tensors"):
        TensorCache(tmp_path)
    (tmp_path / "tensor-cache.json").write_text("[1")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        TensorCache(tmp_path)
