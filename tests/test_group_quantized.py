"""AWQ and GPTQ checkpoints, packed here by the letter of their formats, arrive without a second rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import edit_json, write_json, write_safetensors, write_shards, write_tokenizer
from kvq.errors import KvqError
from kvq.loader import open_checkpoint
from kvq.loader.source import resolve_for
from test_source_weights import check_conversion
from tiny_llama import TinyLlama

TINY = TinyLlama(seed=8, hidden_size=192, intermediate_size=256, num_layers=1)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(values: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Eight neighbours along an axis to an int32; field ``i`` holds neighbour ``order[i]``."""
    values = np.moveaxis(values, axis, 0).astype(np.uint32)
    words = np.zeros((len(values) // 8, *values.shape[1:]), np.uint32)
    for field, neighbour in enumerate(order):
        words |= values[neighbour::8] << np.uint32(4 * field)
    return np.ascontiguousarray(np.moveaxis(words, 0, axis)).view(np.int32)


def quantize(name: str, weight: np.ndarray, method: str, group: int, act_order: bool, fmt: str):
    """The tensors of a quantized matrix ``[out, in]``, and the weights that they stand for."""
    n, k = weight.shape
    group = k if group == -1 else group
    rng = np.random.default_rng(len(name))
    index = np.arange(k) // group
    if act_order:
        index = rng.permutation(index)
    codes = rng.integers(0, 16, (k, n))
    # a stored zero has 4 bits; the first format of GPTQ adds one to it
    added = int(method == "gptq" and fmt == "gptq")
    zeros = rng.integers(0, 16, (k // group, n)) + added
    scales = (rng.uniform(0.5, 2, zeros.shape) * np.abs(weight).max() / 16).astype(np.float16)
    value = ((codes - zeros[index]) * scales[index].astype(np.float32)).T
    stem = name.removesuffix(".weight")
    order = AWQ_ORDER if method == "awq" else tuple(range(8))
    tensors = {
        f"{stem}.qweight": pack(codes, 0 if method == "gptq" else 1, order),
        f"{stem}.qzeros": pack(zeros - added, 1, order),
        f"{stem}.scales": scales,
    }
    if method == "gptq":
        tensors[f"{stem}.g_idx"] = index.astype(np.int32)
    return tensors, value.astype(np.float32)


def write(path: Path, method: str, group: int, act_order: bool = False, fmt: str = "gptq", shards: int = 1):
    """A checkpoint whose projections are quantized, and what its tensors stand for."""
    path.mkdir()
    tensors: dict[str, np.ndarray] = {}
    values = {}
    for name, weight in TINY.tensors().items():
        if "_proj" in name:
            parts, values[name] = quantize(name, weight, method, group, act_order, fmt)
            tensors.update(parts)
        else:
            tensors[name] = weight.astype(np.float16)
            values[name] = tensors[name].astype(np.float32)
    how: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": group}
    how.update({"version": "gemm"} if method == "awq" else {"desc_act": act_order, "checkpoint_format": fmt})
    write_json(path / "config.json", {**TINY.config(), "quantization_config": how})
    write_tokenizer(path, TINY.vocab_size)
    write_shards(path, tensors, shards, "safetensors")
    return values


@pytest.mark.parametrize(
    ("method", "group", "fmt", "shards"),
    [("awq", 32, "", 1), ("awq", 64, "", 3), ("gptq", 64, "gptq", 3), ("gptq", -1, "gptq_v2", 1)],
)
def test_codes_are_taken_over(tmp_path: Path, method: str, group: int, fmt: str, shards: int) -> None:
    values = write(tmp_path / "in", method, group, fmt=fmt, shards=shards)
    with open_checkpoint(tmp_path / "in") as checkpoint:
        for name, value in values.items():
            np.testing.assert_array_equal(checkpoint.tensor(name), value, err_msg=name)
            np.testing.assert_array_equal(checkpoint.tensor(name, 3, 13), value[3:13], err_msg=name)
    config = check_conversion(tmp_path / "in", tmp_path / "out")
    assert (config.quantization, config.kv_quantization) == ("source", "int4")
    kinds = config.weight_storage
    assert kinds.pop("model.embed_tokens.weight") == "float16"
    assert set(kinds.values()) == {"int4_zero"}


def test_groups_that_are_scattered(tmp_path: Path) -> None:
    values = write(tmp_path / "in", "gptq", 32, act_order=True)
    with open_checkpoint(tmp_path / "in") as checkpoint:
        for name, value in values.items():
            np.testing.assert_array_equal(checkpoint.tensor(name), value, err_msg=name)
        assert resolve_for(checkpoint, "q0f16", None)[0].name == "q0f16"
        with pytest.raises(
            KvqError, match=r"scattered over the inputs \(desc_act\).* use --quantization q0f16"
        ):
            resolve_for(checkpoint, None, None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"quant_method": "bitsandbytes"}, "already quantized (bitsandbytes)"),
        ({"bits": 8}, "awq with other than 4 bits"),
        ({"group_size": 48}, "group_size 48 is not supported"),
        ({"group_size": 64}, "which does not fit awq with groups of 64"),
        ({"version": "gemv"}, "awq of version 'gemv'"),
        ({"quant_method": "gptq"}, "which does not fit gptq with groups of 32"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    path = tmp_path / "in"
    write(path, "awq", 32)
    how = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", **changes}
    edit_json(path / "config.json", quantization_config=how)
    with pytest.raises(KvqError) as error:
        open_checkpoint(path)
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_a_part_that_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "in"
    write(path, "awq", 32)
    tensors, _ = quantize("x.weight", np.ones((64, 64)), "awq", 32, False, "")
    del tensors["x.qzeros"]
    write_safetensors(path / "model.safetensors", tensors)
    with pytest.raises(KvqError, match=r"in: tensor x\.qzeros is missing"):
        open_checkpoint(path)
