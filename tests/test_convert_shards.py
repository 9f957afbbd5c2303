"""Shards and tensor-cache.json: written, read by TVM and back, damaged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from checkpoints import write_tiny_llama
from kvq.convert import convert_weight
from kvq.errors import CheckpointError
from kvq.loader import TensorCache, TensorCacheWriter


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["params_shard_0.bin", "tensor-cache.json"]


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
