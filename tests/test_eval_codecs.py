"""The formats of others: what they store, what they give back, and that a simulated row can be trusted."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from kvq.compare import Comparison
from kvq.errors import ConfigError
from kvq.eval.codecs import PEERS, peer_codec
from kvq.eval.codecs.base import TensorCodec
from kvq.eval.codecs.own import OwnCodec
from kvq.eval.codecs.vllm import gaussian_codebook
from kvq.eval.compiled import CodecPrefiller, CompiledPrefiller, HomePrefiller
from kvq.eval.perplexity import score
from kvq.eval.run import parse_columns
from kvq.quantization.kv_codec import hadamard, unpack_unit
from kvq.quantization.scheme import KVQuantization
from tiny_llama import TinyLlama

PAGE, DIM = 64, 64


def page(seed: int = 0, outliers: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """K and V float32 ``[2, page, head_dim]``; K has a constant part a channel, and a few wide channels."""
    rng = np.random.RandomState(seed)
    k, v = rng.standard_normal((2, 2, PAGE, DIM)).astype(np.float32)
    k += 2 * rng.standard_normal(DIM).astype(np.float32)
    k[..., ::16] *= outliers
    return k, v


def error(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.square(found - exact).sum() / np.square(exact).sum())


@pytest.mark.parametrize("name", PEERS)
def test_every_codec_gives_pages_back(name: str) -> None:
    codec, bits = PEERS[name], int(next(c for c in name if c in "2348"))
    k, v = page()
    kept = k.copy(), v.copy()
    new_k, new_v = codec.round_trip(k, v)
    assert (k == kept[0]).all() and (v == kept[1]).all(), "the rows that came in are the caller's"
    assert new_k.shape == k.shape and new_v.shape == v.shape
    assert new_k.dtype == new_v.dtype == np.float32
    # A uniform quantizer of b bits over about +-3 standard deviations errs by a step over the root of 12.
    step = 6 / (2**bits - 1)
    assert 0 < error(new_v, v) < step**2 / 12 * 2
    assert 0 < error(new_k, k) < step**2 / 12 * 4
    assert bits < codec.bits_per_value(128) <= codec.bits_per_value(64) <= bits + 1.5


@pytest.mark.parametrize("name", PEERS)
def test_equal_values_and_zeros_are_finite(name: str) -> None:
    k, v = np.zeros((2, 1, PAGE, DIM), np.float32)
    for found in PEERS[name].round_trip(k, v):
        assert (found == 0).all()
    k[:], v[:] = 3.0, -2.0
    for found, exact in zip(PEERS[name].round_trip(k, v), (k, v), strict=True):
        assert np.isfinite(found).all()
        if not name.startswith(("vllm", "turboquant")):  # signs and rotation make equal values unequal
            assert found == pytest.approx(exact, rel=0.15)


#: Group of K and of V that shares one scale: (tokens, channels); and how it is rotated before.
GROUPS = {
    "mlc-int4": ((1, 32), (1, 32), False),
    "mlc-int3": ((1, 40), (1, 40), False),
    "lmdeploy-int4": ((1, 64), (1, 64), False),
    "lmdeploy-int3": ((1, 64), (1, 64), False),
    "llama.cpp-q4_0": ((1, 32), (1, 32), False),
    "llama.cpp-q4_0-rotated": ((1, 32), (1, 32), True),
    "llama.cpp-q3_1": ((1, 32), (1, 32), False),
    "llama.cpp-q3_1-rotated": ((1, 32), (1, 32), True),
    "kivi-int4": ((32, 1), (1, 32), False),
    "kivi-int2": ((32, 1), (1, 32), False),
}


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_has_as_many_values_as_codes(name: str) -> None:
    """Counts the distinct values of each group: a wrong axis, group or number of levels shows."""
    *groups, rotated = GROUPS[name]
    bits = int(next(c for c in name if c in "234"))
    most = 0
    for found, (tokens, channels) in zip(PEERS[name].round_trip(*page()), groups, strict=True):
        rows = found @ hadamard(DIM) if rotated else found
        for head, token, channel in itertools.product(
            range(2), range(0, PAGE, tokens), range(0, DIM, channels)
        ):
            group = rows[head, token : token + tokens, channel : channel + channels]
            values = np.sort(group.ravel())
            distinct = 1 + int((np.diff(values) > 1e-4).sum())
            most = max(most, distinct)
            assert distinct <= 2**bits
    assert most >= 2**bits - 1


def test_q4_0_of_a_known_block() -> None:
    x = np.zeros((1, 1, 32), np.float32)
    x[0, 0, :4] = [-4.0, 4.0, 1.26, -0.2]
    found = PEERS["llama.cpp-q4_0"].round_trip(x, x)[0][0, 0]
    assert found[:4].tolist() == [-4.0, 3.5, 1.5, 0.0]


def test_lmdeploy_of_a_known_token() -> None:
    x = np.linspace(10, 25, 16, dtype=np.float32).reshape(1, 1, 16)
    assert PEERS["lmdeploy-int4"].round_trip(x, x)[0] == pytest.approx(x, abs=1e-5)


def test_vllm_cannot_shift_its_zero_point_past_the_codes() -> None:
    """A token far from zero: an integer zero point in 0 .. 15 spans from zero, a float one fits the range."""
    x = np.full((1, 1, 64), 100.0, np.float32) + np.linspace(0, 1, 64, dtype=np.float32)
    rotated_back = x @ hadamard(64)
    assert error(PEERS["lmdeploy-int4"].round_trip(x, x)[0], x) < 1e-5
    assert error(PEERS["vllm-int4"].round_trip(rotated_back, x)[0], rotated_back) > 1e-5


def test_gaussian_codebooks_are_those_of_lloyd_and_max() -> None:
    """Max, Quantizing for minimum distortion (1960), table I."""
    assert gaussian_codebook(2)[2:] == pytest.approx((0.4528, 1.510), abs=1e-3)
    assert gaussian_codebook(3)[4:] == pytest.approx((0.2451, 0.7560, 1.344, 2.152), abs=1e-3)
    positive = np.array(gaussian_codebook(4)[8:])
    assert positive[[0, 7]] == pytest.approx((0.1284, 2.733), abs=1e-3)
    assert np.array(gaussian_codebook(4)[:8]) == pytest.approx(-positive[::-1])


def test_outlier_channels_of_keys_hurt_tokens_not_channels() -> None:
    """The reason for kvq's format, in one number: channels a hundred times as wide as the others."""
    k, v = page(outliers=100.0)
    quiet = np.ones(DIM, bool)
    quiet[::16] = False
    per_channel, per_token, rotated = (
        error(PEERS[name].round_trip(k, v)[0][..., quiet], k[..., quiet])
        for name in ("kvq-int4-even", "lmdeploy-int4", "vllm-int4")
    )
    assert per_channel < 0.01
    assert per_token > 50 * per_channel
    assert rotated > 50 * per_channel


def test_columns() -> None:
    assert parse_columns("none, int4,peer:kivi-int4,int4") == ["float32", "none", "int4", "peer:kivi-int4"]
    assert parse_columns("int4,float32", "none") == ["none", "int4", "float32"]
    assert parse_columns("peer:all")[1:] == [f"peer:{name}" for name in PEERS]
    assert parse_columns("home:vllm-int4")[1:] == ["home:vllm-int4"]
    assert "home:mlc-int4" in parse_columns("home:all") and "home:kivi-int4" not in parse_columns("home:all")
    for text in ("peer:absent", "home:absent", "home:kivi-int4", "int5"):
        with pytest.raises(ConfigError, match=text):
            parse_columns(text)
    with pytest.raises(ConfigError, match="absent"):
        peer_codec("absent")


def test_a_simulated_row_is_what_the_library_does(
    tmp_path: Path, build_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheme through its codec against the library compiled for it: the same pages, the same loss."""
    monkeypatch.setenv("KVQ_CACHE", str(build_cache))
    case = TinyLlama(seed=20, gqa=3, head_dim=64)
    checkpoint = case.write(tmp_path / "model")
    comparison = Comparison(str(checkpoint), "q0f32", ["float32", "k=int8:v=int2", "float32"], "O1")
    exact, quantized, simulated = comparison.load(300, 100)
    prefillers = [
        CompiledPrefiller(exact),
        CompiledPrefiller(quantized),
        CodecPrefiller(simulated, OwnCodec(KVQuantization("int8", "int2"))),
    ]
    scores = score(prefillers, case.prompt(300), window=300, stride=300, chunk=100)
    (_, library, codec) = scores
    assert library.quantized_keys == codec.quantized_keys > 0
    assert np.mean(library.kl) > 1e-3
    assert np.mean(codec.kl) == pytest.approx(np.mean(library.kl), rel=0.05)
    assert np.mean(codec.nll) == pytest.approx(np.mean(library.nll), abs=2e-3)
    # The first layer reads no cache, so it holds the same rows; V is rotated in another order of additions.
    pages = [
        unpack_unit(np.from_dlpack(model.tensors.pool)[list(model.cache.sequence(0).pages), 0], model.layout)
        for model in (quantized, simulated)
    ]
    assert len(pages[0]["k"]) == 4
    assert pages[1]["k"] == pytest.approx(pages[0]["k"], abs=1e-6)
    assert np.isclose(pages[1]["v"], pages[0]["v_unrotated"], atol=1e-2).mean() > 0.99


def test_at_home_every_token_is_coded_when_written(
    tmp_path: Path, build_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of open and sealed pages are all codes; more is lost than if a page waited until it is full."""
    monkeypatch.setenv("KVQ_CACHE", str(build_cache))
    case = TinyLlama(seed=20, gqa=3, head_dim=64)
    checkpoint = case.write(tmp_path / "model")
    models = Comparison(str(checkpoint), "q0f32", ["float32"] * 4, "O1").load(200, 100)
    exact, same, by_page, at_home = models
    identity = TensorCodec("same", "", lambda x: x, lambda x: x, lambda _: 32)
    coarse = TensorCodec(
        "coarse", "", lambda x: np.rint(4 * x) / 4, lambda x: np.rint(8 * x) / 8, lambda _: 8
    )
    prefillers = [CompiledPrefiller(exact), HomePrefiller(same, identity)]
    prefillers += [CodecPrefiller(by_page, coarse), HomePrefiller(at_home, coarse)]
    scores = score(prefillers, case.prompt(151), window=151, stride=151, chunk=100)
    assert max(scores[1].kl) == 0, "steps of one token give the bits of a chunk"
    assert 0 < np.mean(scores[2].kl) < np.mean(scores[3].kl)
    assert [found.quantized_keys for found in scores] == [
        0,
        149 * 150 // 2,
        64 * 64 + 128 * 22,
        149 * 150 // 2,
    ]
    sequence, layout = at_home.cache.sequence(0), at_home.layout
    pages = unpack_unit(np.from_dlpack(at_home.tensors.pool)[list(sequence.pages)], layout)
    k, v = np.moveaxis(np.from_dlpack(at_home.tensors.open)[sequence.open_page], 2, 0)
    k, v = k.reshape(2, 2, 64, 64)[..., :22], v.reshape(2, 2, 64, 64)[:, :, :22]
    for stored, steps in ((pages["k"], 4), (k, 4), (pages["v"], 8), (v, 8)):
        assert stored.any()
        assert (stored * steps == np.rint(stored * steps)).all()
    with pytest.raises(ValueError, match="token by token"):
        HomePrefiller(exact, PEERS["kivi-int4"])


def test_a_codec_needs_rows(tmp_path: Path, build_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CACHE", str(build_cache))
    checkpoint = TinyLlama(seed=20, gqa=3, head_dim=64).write(tmp_path / "model")
    (int3,) = Comparison(str(checkpoint), "q0f32", ["int3"], "O1").load(64, 64)
    with pytest.raises(ValueError, match="rows"):
        CodecPrefiller(int3, PEERS["kvq-int8"])
