"""Keys with outlier channels, as Qwen2.5 has them, cost no more than plain ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from kernel_rig import CacheRig
from kvq.build import prepare_model
from kvq.eval.codecs import PEERS
from kvq.eval.compiled import CodecPrefiller, CompiledPrefiller
from kvq.eval.metrics import Scores
from kvq.eval.perplexity import score
from kvq.layout import KVLayout
from kvq.loader.checkpoint import open_checkpoint
from kvq.runtime.loaded_model import load_model
from tiny_llama import TinyLlama

SCRIPT = Path(__file__).parent.parent / "scripts" / "scale_keys.py"
CASE = TinyLlama(seed=20, gqa=3, head_dim=64)


def script() -> Any:
    spec = importlib.util.spec_from_file_location("scale_keys", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exact_attention(qkv: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """Causal attention in float64 over rows ``[n, Hq + 2 H, D]`` that nothing rounded."""
    q, k, v = np.split(qkv.astype(np.float64), [heads, heads + kv_heads], axis=1)
    k, v = (np.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(qkv.shape[-1])
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), v)


@pytest.mark.parametrize("bits", [4, 3])
def test_an_offset_at_most_doubles_the_error_of_attention(bits: int) -> None:
    """A constant on a key channel shifts all scores of a query alike: exact attention does not see it."""
    layout, tokens = KVLayout(1, 2, 64, bits, bits), 256
    errors = []
    for offset in (0.0, 100.0):
        rig = CacheRig(layout, 2, seed=1)
        qkv = rig.random_rows(tokens)
        exact = exact_attention(qkv, rig.num_heads, 2)[64:]
        qkv[:, rig.num_heads : rig.num_heads + 2, [1, 9, 17, 30, 33, 41, 50, 62]] += np.float32(offset)
        out, _ = rig.append([("a", tokens)], qkv)
        errors.append(np.sqrt(np.square(out[64:] - exact).mean()))
    plain, shifted = errors
    assert plain > 1e-3, "most keys of these rows are codes"
    assert shifted < 2 * plain


def test_scaling_keeps_the_function(tmp_path: Path) -> None:
    """Every score keeps its value: the query's weight times the key's, pair by pair."""
    case = CASE.write(tmp_path / "model")
    with open_checkpoint(case) as checkpoint:
        config, scaled = checkpoint.config, script().scaled
        name = "model.layers.0.self_attn.{}_proj.weight"
        q, k = (checkpoint.tensor(name.format(part)) for part in "qk")
        new_q, new_k = (scaled(name.format(part), value, config) for part, value in (("q", q), ("k", k)))
        other = checkpoint.tensor("model.layers.0.mlp.up_proj.weight")
        assert (scaled("model.layers.0.mlp.up_proj.weight", other, config) == other).all()
    wide = np.flatnonzero((new_k != k).any(axis=1))
    assert len(wide) == 8 * config.num_key_value_heads
    assert set(wide % 32) == {4, 12, 20, 28} and set(wide % 64 // 32) == {0, 1}
    assert new_k[wide] == pytest.approx(100 * k[wide], rel=1e-6)
    q_heads, k_heads = (x.reshape(-1, 64, x.shape[1]) for x in (q, k))
    new_q_heads, new_k_heads = (x.reshape(-1, 64, x.shape[1]) for x in (new_q, new_k))
    for query, key in ((0, 0), (5, 1)):
        found = np.einsum("di,dj->dij", new_q_heads[query], new_k_heads[key])
        expected = np.einsum("di,dj->dij", q_heads[query], k_heads[key])
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)


def test_outlier_channels_cost_a_model_no_more(tmp_path: Path, build_cache: Path) -> None:
    """kvq's keys have a scale a channel, so scaled channels change little; a scale a token breaks."""
    plain, wide = CASE.write(tmp_path / "plain"), CASE.write(tmp_path / "wide")
    with open_checkpoint(plain) as checkpoint:
        tensors = {
            name: script().scaled(name, CASE.tensor(name), checkpoint.config) for name in CASE.shapes()
        }
    safetensors.numpy.save_file(tensors, wide / "model.safetensors")
    libraries = {
        kv: prepare_model(plain, "q0f32", kv, opt="O1", cache_dir=build_cache).library
        for kv in ("float32", "int4")
    }

    def losses(model: Path) -> list[Scores]:
        weights = prepare_model(
            model, "q0f32", "float32", model_lib=libraries["float32"], cache_dir=build_cache
        ).weights_dir
        exact, int4, peer = (
            load_model(libraries[kv], weights, context_window_size=512, max_batch_size=1)
            for kv in ("float32", "int4", "float32")
        )
        models = [CompiledPrefiller(exact), CompiledPrefiller(int4)]
        models.append(CodecPrefiller(peer, PEERS["lmdeploy-int4"]))
        return score(models, CASE.prompt(400), window=400, stride=400, chunk=128)

    before, after = losses(plain), losses(wide)
    assert after[0].perplexity == pytest.approx(before[0].perplexity, rel=1e-4)
    plain_kl, wide_kl = ([float(np.mean(found.kl)) for found in scores] for scores in (before, after))
    assert 1e-4 < wide_kl[1] < 1.25 * plain_kl[1]
    assert wide_kl[2] > 3 * plain_kl[2] > 0
