"""Checkpoints of every format give the tensors that were written, and damaged ones one line of error."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from checkpoints import (
    DTYPES,
    edit_json,
    write_gguf,
    write_json,
    write_safetensors,
    write_shards,
    write_tiny_llama,
)
from kvq.errors import CheckpointError, ConfigError, KvqError
from kvq.loader import open_checkpoint
from kvq.loader.check import check_tensors
from kvq.loader.gguf_config import llama3_factors
from kvq.model.parameters import model_parameters
from tiny_llama import TinyLlama


def refuse(path: Path) -> str:
    """Open and check a checkpoint that must be refused; the message, which must be one line."""
    with pytest.raises(KvqError) as error, open_checkpoint(path) as checkpoint:
        check_tensors(checkpoint, model_parameters(checkpoint.config))
        for name in checkpoint.tensor_names():
            checkpoint.tensor(name)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("fmt", ["safetensors", "bin", "gguf"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("tied", "bias", "shards"), [(True, False, 1), (False, True, 3)])
def test_tensors_are_what_was_written(
    tmp_path: Path, fmt: str, dtype: str, tied: bool, bias: bool, shards: int
) -> None:
    tiny = TinyLlama(seed=5, gqa=3, head_dim=64, tied=tied, bias=bias)
    path = write_tiny_llama(
        tmp_path, seed=5, gqa=3, head_dim=64, tied=tied, bias=bias, dtype=dtype, shards=shards, fmt=fmt
    )
    with open_checkpoint(path) as checkpoint:
        assert set(checkpoint.tensor_names()) == set(tiny.shapes())
        check_tensors(checkpoint, model_parameters(checkpoint.config))
        for name, written in tiny.tensors().items():
            stored = written if fmt == "gguf" and written.ndim == 1 else written.astype(DTYPES[dtype])
            read = checkpoint.tensor(name)
            assert read.shape == written.shape
            np.testing.assert_array_equal(read.astype(np.float32), stored.astype(np.float32), err_msg=name)
            rows = checkpoint.tensor(name, 3, 70)
            np.testing.assert_array_equal(rows.astype(np.float32), stored[3:70].astype(np.float32))
            if fmt != "gguf":
                assert read.dtype == DTYPES[dtype]


@pytest.mark.parametrize("gqa", [1, 3, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_configuration_is_the_same_from_each_format(tmp_path: Path, gqa: int, head_dim: int) -> None:
    configs = []
    for fmt in ("safetensors", "gguf"):
        path = write_tiny_llama(tmp_path / fmt, gqa=gqa, head_dim=head_dim, fmt=fmt)
        with open_checkpoint(path) as checkpoint:
            configs.append(checkpoint.config)
    assert configs[0] == configs[1]
    assert configs[0].num_attention_heads == gqa * configs[0].num_key_value_heads
    assert configs[0].rms_norm_eps == 1e-5


def test_block_formats_are_dequantized(tmp_path: Path) -> None:
    tiny = TinyLlama(seed=1)
    for dtype, tolerance in (("Q8_0", 0.01), ("Q4_1", 0.15)):
        path = write_tiny_llama(tmp_path / dtype, seed=1, dtype=dtype, fmt="gguf")
        with open_checkpoint(path) as checkpoint:
            for name in ("model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight"):
                written, read = tiny.tensor(name), checkpoint.tensor(name)
                error = np.linalg.norm(read - written) / np.linalg.norm(written)
                assert 0 < error < tolerance, (dtype, name)


def test_directory_with_one_gguf(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, fmt="gguf")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.path.name == "model.gguf"
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    assert "2 .gguf files" in refuse(tmp_path)


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    def fingerprint(path: Path) -> str:
        with open_checkpoint(path) as checkpoint:
            return checkpoint.fingerprint()

    first = fingerprint(write_tiny_llama(tmp_path / "a", seed=1))
    assert fingerprint(write_tiny_llama(tmp_path / "b", seed=1)) == first
    assert fingerprint(write_tiny_llama(tmp_path / "c", seed=2)) != first
    edit_json(tmp_path / "b" / "config.json", rope_theta=20000.0)
    assert fingerprint(tmp_path / "b") != first


# ---- tied and untied, with and without lm_head -----------------------------------------------------
@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
@pytest.mark.parametrize("config_ties", [True, False])
@pytest.mark.parametrize("has_head", [True, False])
def test_tied_embeddings_matrix(tmp_path: Path, fmt: str, config_ties: bool, has_head: bool) -> None:
    tensors = TinyLlama(seed=3, tied=not has_head).tensors()
    write_json(tmp_path / "config.json", TinyLlama(seed=3, tied=config_ties).config())
    write_shards(tmp_path, tensors, 1, fmt)
    if not config_ties and not has_head:
        message = refuse(tmp_path)
        assert "lm_head.weight" in message and "tie_word_embeddings" in message
        return
    with open_checkpoint(tmp_path) as checkpoint:
        check_tensors(checkpoint, model_parameters(checkpoint.config))


def test_tied_embeddings_stored_as_lm_head(tmp_path: Path) -> None:
    tensors = TinyLlama(seed=3).tensors()
    embeddings = tensors.pop("model.embed_tokens.weight")
    write_json(tmp_path / "config.json", TinyLlama(seed=3).config())
    write_shards(tmp_path, {**tensors, "lm_head.weight": embeddings}, 1, "safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        check_tensors(checkpoint, model_parameters(checkpoint.config))
        np.testing.assert_array_equal(checkpoint.tensor("model.embed_tokens.weight"), embeddings)


def test_a_file_of_torch_by_its_other_name(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path, fmt="bin")
    (path / "pytorch_model.bin").rename(path / "model.pt")
    with open_checkpoint(path) as checkpoint:
        check_tensors(checkpoint, model_parameters(checkpoint.config))


def test_neither_embeddings_nor_head(tmp_path: Path) -> None:
    tensors = TinyLlama(seed=3).tensors()
    del tensors["model.embed_tokens.weight"]
    write_json(tmp_path / "config.json", TinyLlama(seed=3).config())
    write_shards(tmp_path, tensors, 1, "safetensors")
    assert "model.embed_tokens.weight is missing" in refuse(tmp_path)


# ---- configuration ---------------------------------------------------------------------------------
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("linear", {"factor": 2.0}),
        ("dynamic", {"factor": 2.0, "original_max_position_embeddings": 1024}),
        ("llama3", LLAMA3),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 512}),
        (
            "longrope",
            {
                "short_factor": [1.0] * 32,
                "long_factor": [2.0] * 32,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        ),
    ],
)
def test_rope_scaling_under_either_key(
    tmp_path: Path, key: str, kind: str, numbers: dict[str, object]
) -> None:
    path = write_tiny_llama(tmp_path)
    edit_json(path / "config.json", rope_scaling={key: kind, **numbers})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config.rope_scaling == {"rope_type": kind, **numbers}
    edit_json(path / "config.json", rope_scaling={key: kind})
    assert f"rope_scaling of kind '{kind}' lacks" in refuse(path)


def test_rope_scaling_of_other_spellings(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path)
    for given in (None, {"rope_type": "default"}, {"type": "default"}):
        edit_json(path / "config.json", rope_scaling=given)
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.config.rope_scaling is None
    edit_json(path / "config.json", rope_scaling={"type": "spiral", "factor": 2.0})
    assert "'spiral'" in refuse(path)
    edit_json(path / "config.json", rope_scaling={"factor": 2.0})
    assert "kind None" in refuse(path)
    # Newer files put base and scaling together.
    newer = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    edit_json(path / "config.json", rope_scaling=None, rope_theta=None, rope_parameters=newer)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config.rope_theta == 5e5
        assert checkpoint.config.rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_head_dim_defaults_to_hidden_over_heads(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path, gqa=3, head_dim=32)
    edit_json(path / "config.json", head_dim=None)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config.head_dim == 192 // 6
    edit_json(path / "config.json", num_attention_heads=5, num_key_value_heads=5)
    assert "hidden_size 192 is not a multiple of num_attention_heads 5" in refuse(path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "rwkv7"}, "unknown architecture 'rwkv7': known are llama, mistral"),
        ({"model_type": None}, "unknown architecture 'LlamaForCausalLM'"),
        ({"num_attention_heads": 4}, "num_attention_heads 4, num_key_value_heads 2"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
        ({"num_key_value_heads": 3}, "k_proj.weight has shape [128, 192]"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "many"}, "vocab_size: "),
        ({"vocab_size": 300}, "model.embed_tokens.weight has shape [320, 192]"),
        ({"num_hidden_layers": 3}, "model.layers.2"),
        ({"num_hidden_layers": 1}, "not used by the model: num_hidden_layers does not fit"),
        ({"attention_bias": True}, "attention_bias or mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "already quantized (fp8)"),
        ({"model_type": "qwen2_moe"}, "unknown architecture 'qwen2_moe'"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, changes: dict[str, object], expected: str) -> None:
    path = write_tiny_llama(tmp_path)
    edit_json(path / "config.json", **changes)
    message = refuse(path)
    assert expected in message and str(tmp_path) in message


def test_scaling_counts_from_the_trained_context(tmp_path: Path) -> None:
    """What a file leaves out of a scaling is that the original context is ``max_position_embeddings``."""
    path = write_tiny_llama(tmp_path)
    edit_json(path / "config.json", rope_scaling={"type": "dynamic", "factor": 2.0})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config.rope_scaling["original_max_position_embeddings"] == 1024
    # Phi-3 puts the original context beside the scaling, and leaves the factor out.
    factors = {"short_factor": [1.0] * 24, "long_factor": [2.0] * 24}
    edit_json(
        path / "config.json",
        rope_scaling={"type": "su", **factors},
        original_max_position_embeddings=256,
        partial_rotary_factor=0.75,
    )
    with open_checkpoint(path) as checkpoint:
        scaling = {"factor": 4.0, "original_max_position_embeddings": 256, **factors}
        assert checkpoint.config.rope_scaling == {"rope_type": "longrope", **scaling}
        assert checkpoint.config.rotary_dim == 48


def test_windows(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path)
    for window, kept in ((None, None), (512, 512), (1024, None)):  # 1024: no sequence is longer
        edit_json(path / "config.json", model_type="mistral", sliding_window=window)
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.config.model_type == "mistral"
            assert {layer.window for layer in checkpoint.config.layer_attention} == {kept}


# ---- files that are missing or damaged ---------------------------------------------------------------
def test_missing_paths(tmp_path: Path) -> None:
    assert "no such file" in refuse(tmp_path / "nothing")
    assert "no config.json and no .gguf" in refuse(tmp_path)
    (tmp_path / "model.txt").write_text("hello")
    assert "expected a .gguf file" in refuse(tmp_path / "model.txt")
    (tmp_path / "config.json").write_text("{ not json")
    assert "config.json: not valid JSON" in refuse(tmp_path)
    write_json(tmp_path / "config.json", TinyLlama(seed=1).config())
    assert "no *.safetensors, pytorch_model*.bin or *.pt" in refuse(tmp_path)


@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
def test_missing_shard(tmp_path: Path, fmt: str) -> None:
    path = write_tiny_llama(tmp_path, shards=3, fmt=fmt)
    shard = sorted(path.glob(f"*-00002-of-00003.{fmt}"))[0]
    shard.unlink()
    assert f"{shard.name}: this shard is named in" in refuse(path)
    next(path.glob("*.index.json")).unlink()
    assert "2 of 3 shards are here" in refuse(path)


@pytest.mark.parametrize("fmt", ["safetensors", "bin", "gguf"])
@pytest.mark.parametrize("kept", [0, 3, 9, 200, 0.3, 0.99, -1])
def test_truncated_files(tmp_path: Path, fmt: str, kept: float) -> None:
    path = write_tiny_llama(tmp_path, fmt=fmt)
    file = path if path.is_file() else next(p for p in path.glob(f"*.{fmt}"))
    data = file.read_bytes()
    file.write_bytes(data[: int(kept * len(data)) if 0 < kept < 1 else int(kept)])
    assert file.name in refuse(path)


def test_safetensors_with_a_wrong_table(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path)
    file = path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes((1 << 60).to_bytes(8, "little") + data[8:])
    assert "header is damaged" in refuse(path)
    file.write_bytes(data + b"more")
    assert "cut or damaged" in refuse(path)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header["model.norm.weight"]["shape"] = [7]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :])
    assert "model.norm.weight" in refuse(path)


def test_a_dtype_that_is_no_float(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path)
    tensors = TinyLlama(seed=0).tensors()
    tensors["model.norm.weight"] = np.ones(192, np.int32)
    write_safetensors(path / "model.safetensors", tensors)
    assert "tensor model.norm.weight is I32" in refuse(path)


class _Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("this must not run",))


def test_pickles_that_would_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny_llama(tmp_path, fmt="bin")
    with zipfile.ZipFile(path / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"x": _Harmful()}))
    assert "builtins.print" in refuse(path)
    assert capsys.readouterr().out == ""


def test_unused_and_missing_tensors_are_named(tmp_path: Path) -> None:
    tensors = TinyLlama(seed=1).tensors()
    write_json(tmp_path / "config.json", TinyLlama(seed=1).config())
    write_shards(tmp_path, {f"model.{name}": t for name, t in tensors.items()}, 1, "safetensors")
    message = refuse(tmp_path)
    assert "model.embed_tokens.weight" in message and "model.model.embed_tokens.weight" in message
    assert "more are missing" in message and "prefix" in message
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(32, np.float32)}
    write_shards(tmp_path, {**tensors, **buffers}, 1, "safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        check_tensors(checkpoint, model_parameters(checkpoint.config))


# ---- GGUF --------------------------------------------------------------------------------------------
def test_gguf_of_another_architecture(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TinyLlama(seed=1), arch="falcon")
    assert "unknown architecture 'falcon': known are llama, qwen2" in refuse(path)


def test_gguf_in_parts(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m-00001-of-00002.gguf", TinyLlama(seed=1), parts=2)
    assert "one of 2 parts of a model: merge them" in refuse(path)


def test_gguf_llama3_factors(tmp_path: Path) -> None:
    factors = llama3_factors(LLAMA3, 10000.0, 64).astype(np.float32)
    assert factors.min() == 1.0 and factors.max() == 8.0
    path = write_gguf(tmp_path / "m.gguf", TinyLlama(seed=1), extra={"rope_freqs.weight": factors})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config.rope_scaling == {"rope_type": "llama3", **LLAMA3}
    path = write_gguf(
        tmp_path / "n.gguf", TinyLlama(seed=1), extra={"rope_freqs.weight": factors[::-1].copy()}
    )
    assert "not those of llama3 scaling" in refuse(path)


def test_errors_are_of_the_right_kind(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)
    path = write_tiny_llama(tmp_path)
    edit_json(path / "config.json", model_type="rwkv7")
    with pytest.raises(ConfigError):
        open_checkpoint(path)
