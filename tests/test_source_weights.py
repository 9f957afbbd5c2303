"""``--quantization source``: the codes of a checkpoint arrive in the kernels as they are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from checkpoints import write_gguf, write_tiny_llama
from kvq.build import prepare_model
from kvq.config import ChatConfig
from kvq.convert import convert_weight
from kvq.errors import CheckpointError, ConfigError
from kvq.gen_config import gen_config
from kvq.loader import TensorCache, open_checkpoint
from kvq.loader.gguf_blocks import STORAGE_OF, packed_rows
from kvq.loader.source import resolve_for
from kvq.memory import weights_bytes
from kvq.model.parameters import model_parameters
from kvq.quantization.scheme import resolve
from kvq.quantization.storage import STORAGES, PackedRows, join, pack_codes, unpack_codes
from kvq.runtime.loaded_model import load_model
from tiny_llama import TinyLlama

#: Where the blocks of a type have their float16 numbers.
SCALES_AT = {"Q4_1": 2, "Q5_1": 2, "Q2_K": 82, "Q3_K": 108, "Q4_K": 2, "Q5_K": 2, "Q6_K": 208}
EXACT = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
#: A type a tensor, so that every fused matrix joins others.
MIXED = {
    "embed_tokens": "Q8_0",
    "0.self_attn.q_proj": "Q4_0",
    "0.self_attn.k_proj": "Q4_1",
    "0.self_attn.v_proj": "Q8_0",
    "1.mlp.up_proj": "Q4_0",
    "1.mlp.down_proj": "Q5_1",
    "o_proj": "Q5_0",
    "0.mlp": "Q4_0",
}
TINY = TinyLlama(seed=5)


def random_blocks(kind: str, rows: int, columns: int) -> tuple[np.ndarray, int]:
    """Random bytes with sensible scales: rows of blocks, and the bytes of a block."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(len(kind) + columns)
    raw = rng.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    last = SCALES_AT.get(kind, 0)
    for at in {last, last - 2 if last in (2, 82) else last}:
        raw[:, at : at + 2] = rng.uniform(-0.1, 0.1, (len(raw), 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1), size


@pytest.mark.parametrize("kind", [kind for kind, name in STORAGE_OF.items() if STORAGES[name].bits])
def test_blocks_are_taken_apart(kind: str) -> None:
    raw, size = random_blocks(kind, 5, 768)
    rows = packed_rows(raw, kind, size)
    expected = dequantize(raw, GGMLQuantizationType[kind])
    if kind in EXACT:
        np.testing.assert_array_equal(rows.dequantized(), expected)
    else:  # each product of two scales is rounded to float16 once
        assert np.abs(rows.dequantized() - expected).max() <= np.abs(expected).max() * 2**-10
    bits = STORAGES[rows.storage].bits
    assert bits is not None
    np.testing.assert_array_equal(unpack_codes(pack_codes(rows.codes, bits), bits), rows.codes)


def some_rows(storage: str) -> PackedRows:
    kind, rng = STORAGES[storage], np.random.default_rng(1)
    shape = (3, 64 // kind.group)
    offset = None
    if kind.offset:
        offset = rng.integers(0, 16, shape).astype(np.float16)
    codes = rng.integers(0, 2 ** (kind.bits or 0), (3, 64), dtype=np.uint8)
    if kind.bits == 8:
        codes = np.clip(codes, 30, 225)
    return PackedRows(storage, codes, rng.standard_normal(shape).astype(np.float16), offset)


@pytest.mark.parametrize(
    "names", list(itertools.combinations_with_replacement([n for n, k in STORAGES.items() if k.bits], 2))
)
def test_what_two_kinds_have_in_common_rounds_nothing(names: tuple[str, str]) -> None:
    both = join(*names)
    assert both == join(*reversed(names)) and join(both, *names) == both
    for name in names:
        rows = some_rows(name)
        np.testing.assert_array_equal(rows.widened(both).dequantized(), rows.dequantized())


def test_codes_beside_floats_become_floats() -> None:
    assert join("float16", "float16") == "float16"
    assert join("float16", "int8") == join("int4", "float32") == "float32"


def stored_value(cache: TensorCache, name: str, storage: str) -> np.ndarray:
    """The matrix that a weights directory holds."""
    kind = STORAGES[storage]
    if kind.bits is None:
        return cache.read(name)
    stem = name.removesuffix(".weight")
    offset = cache.read(f"{stem}.q_{kind.offset}") if kind.offset else None
    codes = unpack_codes(cache.read(f"{stem}.q_weight"), kind.bits)
    return PackedRows(storage, codes, cache.read(f"{stem}.q_scale"), offset).dequantized()


def check_conversion(path: Path, out: Path) -> ChatConfig:
    """Convert with the defaults, and compare every parameter with the checkpoint's tensors."""
    convert_weight(path, None, out)
    config, cache = gen_config(path, None, out), TensorCache(out)
    weights, _ = resolve(config.quantization, None, config.weight_storage)
    with open_checkpoint(path) as checkpoint:
        for parameter in model_parameters(checkpoint.config):
            expected = np.concatenate(
                [checkpoint.tensor(name).astype(np.float32) for name in parameter.sources]
            )
            storage = weights.storage(parameter.name, parameter.quantize)
            found = stored_value(cache, parameter.name, storage)
            np.testing.assert_array_equal(found, expected, err_msg=parameter.name)
    return config


def test_a_gguf_of_many_types_is_converted_exactly(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "mixed.gguf", TINY, "Q4_1", dtypes=MIXED)
    config = check_conversion(path, tmp_path / "out")
    assert (config.quantization, config.kv_quantization) == ("source", "int4")
    storage = config.weight_storage
    assert storage["model.embed_tokens.weight"] == "int8"
    assert storage["model.layers.0.self_attn.qkv_proj.weight"] == "int8_min"
    assert storage["model.layers.0.mlp.gate_up_proj.weight"] == "int4"
    assert storage["model.layers.1.mlp.gate_up_proj.weight"] == "int8_min"
    assert storage["model.layers.1.self_attn.qkv_proj.weight"] == "int4_min"
    assert storage["model.layers.0.self_attn.o_proj.weight"] == "int8"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_floats_are_kept_as_they_are(tmp_path: Path, dtype: str) -> None:
    path = write_tiny_llama(tmp_path / "in", seed=5, dtype=dtype)
    with open_checkpoint(path) as checkpoint:
        assert resolve_for(checkpoint, None, None)[0].name == "q4f16_1"
        weights, kv = resolve_for(checkpoint, "source", None)
    assert set(weights.table.values()) == {dtype} and str(kv) == "none"


def test_schemes_that_are_asked_for(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, "Q8_0")
    with open_checkpoint(path) as checkpoint:
        for asked, kv, expected in (
            (None, None, ("source", "int4")),
            (None, "int3", ("source", "int3")),
            ("source", None, ("source", "none")),
            ("q4f16kv", None, ("q4f16_1", "int4")),
        ):
            weights, found = resolve_for(checkpoint, asked, kv)
            assert (weights.name, str(found)) == expected
    with pytest.raises(ConfigError, match=r"needs the checkpoint, which says how model\.embed_tokens"):
        weights_bytes(checkpoint.config, resolve("source")[0])


def test_a_scale_that_is_no_number(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, "Q4_1")
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.gguf is not None
        raw = checkpoint.gguf.file._tensors["blk.1.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    data[raw.offset : raw.offset + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"m.gguf: tensor model.layers.1.mlp.up_proj.weight has a scale"
    ):
        convert_weight(path, None, tmp_path / "out")


def expected_logits(path: Path, tokens: np.ndarray) -> np.ndarray:
    """A Llama of one layer in numpy, on the weights as the checkpoint's tensors give them."""
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.config
        weights = {name: checkpoint.tensor(name).astype(np.float32) for name in checkpoint.tensor_names()}
    count, dim, layer = len(tokens), config.head_dim, "model.layers.0"
    embeddings = weights["model.embed_tokens.weight"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.rms_norm_eps)
        return x / scale * weights[f"{name}.weight"]

    def project(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{layer}.{name}.weight"].T

    angle = np.arange(count)[:, None, None] * config.rope_theta ** (-np.arange(0, dim, 2) / dim)

    def rotated(x: np.ndarray) -> np.ndarray:
        first, second = np.split(x.reshape(count, -1, dim), 2, axis=-1)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    x = embeddings[tokens]
    inner = norm(x, f"{layer}.input_layernorm")
    q, k = (rotated(project(inner, f"self_attn.{name}_proj")) for name in "qk")
    v = project(inner, "self_attn.v_proj").reshape(count, -1, dim)
    group = config.num_attention_heads // config.num_key_value_heads
    scores = np.einsum("ihd,jhd->hij", q, np.repeat(k, group, axis=1)) / np.sqrt(dim)
    scores = np.exp(np.where(np.tri(count, dtype=bool), scores, -np.inf))
    scores /= scores.sum(axis=-1, keepdims=True)
    attended = np.einsum("hij,jhd->ihd", scores, np.repeat(v, group, axis=1)).reshape(count, -1)
    x = x + project(attended, "self_attn.o_proj")
    inner = norm(x, f"{layer}.post_attention_layernorm")
    gate = project(inner, "mlp.gate_proj")
    x = x + project(gate / (1 + np.exp(-gate)) * project(inner, "mlp.up_proj"), "mlp.down_proj")
    return norm(x, "model.norm") @ embeddings.T


def run(path: Path, opt: str, cache: Path) -> np.ndarray:
    """Logits of 70 tokens through a model compiled by default, of which the last came alone."""
    limits = {"context_window_size": 128, "prefill_chunk_size": 128, "max_batch_size": 1}
    built = prepare_model(path, None, "float32", **limits, opt=opt, cache_dir=cache)
    model = load_model(built.library, built.weights_dir, **limits)
    assert model.metadata.quantization == "source"
    tokens = TINY.prompt(70)
    model.cache.add_sequence(0)
    first = np.array(model.step([(0, 69)], tokens[:69], list(range(69))))
    return np.concatenate([first, np.array(model.step([(0, 1)], tokens[69:], None))])


def test_compiled_logits_are_those_of_the_dequantized_weights(tmp_path: Path, build_cache: Path) -> None:
    path = write_gguf(tmp_path / "mixed.gguf", replace(TINY, num_layers=1), "Q4_1", dtypes=MIXED)
    expected = expected_logits(path, TINY.prompt(70))
    for opt, limit in (("O1", 2e-5), ("O2", 0.05)):
        assert np.abs(run(path, opt, build_cache) - expected).max() < limit * np.abs(expected).max()
