"""Matrix products, embedding and pointwise kernels against numpy; the same bits for any number of rows."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_rig import build, relative_error, tensor
from kvq.compiler.target import cpu_target
from kvq.quantization.weights import dequantize_q4f16_1, quantize_q4f16_1
from kvq.schedules.cpu import activations, linear, weight_blocks
from kvq.schedules.cpu.pointwise import rms_norm, silu_gate
from kvq.schedules.cpu.vector import CpuIsa

ROWS = (1, 2, 7, 16, 64, 512)
SHAPES = [(96, 64), (40, 96), (200, 1536)]


def empty(*shape: int, dtype: str = "float32"):
    return tensor(np.full(shape, 77, dtype))


class Int4Weight:
    """A random weight, stored and prepared."""

    def __init__(self, n: int, k: int) -> None:
        rng = np.random.default_rng(n + k)
        codes, scales = quantize_q4f16_1(rng.standard_normal((n, k)).astype(np.float32))
        self.value = dequantize_q4f16_1(codes, scales)
        blocks, groups = weight_blocks.num_blocks(n), k // weight_blocks.GROUP
        self.codes = empty(blocks, groups, 4, weight_blocks.BLOCK, dtype="uint32")
        self.scales = empty(blocks, groups, weight_blocks.BLOCK, dtype="float16")
        build(weight_blocks.prepare_int4_codes(n, k))(tensor(codes), self.codes)
        build(weight_blocks.prepare_blocks(n, groups, "float16"))(tensor(scales), self.scales)


def unpack_quantized(words: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes int8 [n, K], scales float32 [n, K/32], offsets int32 [n, K/32] of quantized rows."""
    groups = k // weight_blocks.GROUP
    codes, scales, offsets = np.split(words, [k // 4, k // 4 + groups], axis=1)
    return codes.copy().view(np.int8), scales.copy().view(np.float32), offsets


@pytest.mark.parametrize("isa", [cpu_target().isa, CpuIsa(8, "generic")], ids=["native", "generic"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int8_product(n, k, isa):
    weight, rng = Int4Weight(n, k), np.random.default_rng(1)
    x = rng.standard_normal((512, k)).astype(np.float32) * 3
    residual = rng.standard_normal((512, n)).astype(np.float32)
    x[5, :32] = 0
    quantize, product = build(activations.quantize_rows(k, isa)), build(linear.linear_int8(n, k, isa))
    product_add = build(linear.linear_int8(n, k, isa, residual=True))
    results = []
    for rows in ROWS:
        words = empty(rows, activations.quantized_width(k), dtype="int32")
        y, added = empty(rows, n), empty(rows, n)
        quantize(tensor(x[:rows]), words)
        product(words, weight.codes, weight.scales, y)
        product_add(words, weight.codes, weight.scales, tensor(residual[:rows]), added)
        np.testing.assert_array_equal(added.numpy(), y.numpy() + residual[:rows])
        results.append((y.numpy(), words.numpy()))
    for y, words in results:
        np.testing.assert_array_equal(y, results[-1][0][: len(y)])
        np.testing.assert_array_equal(words, results[-1][1][: len(y)])
    codes, scales, offsets = unpack_quantized(results[-1][1], k)
    np.testing.assert_array_equal(
        offsets, -weight_blocks.ZERO * codes.reshape(512, -1, 32).sum(axis=2, dtype=np.int32)
    )
    inputs = (codes.reshape(512, -1, 32) * scales[..., None]).reshape(512, k)
    assert np.abs(inputs - x).max() <= np.abs(x).max() / 127 / 2 * 1.01
    np.testing.assert_array_equal(inputs[5, :32], 0)
    assert relative_error(results[-1][0], inputs @ weight.value.T) < 3e-6


@pytest.mark.parametrize("opt", ["O1", "O0"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_exact_product(n, k, opt):
    weight, isa = Int4Weight(n, k), cpu_target(opt).isa
    x = np.random.default_rng(2).standard_normal((512, k)).astype(np.float32)
    product = build(linear.linear_float(n, k, "int4", isa), opt)
    results = []
    for rows in ROWS:
        y = empty(rows, n)
        product(tensor(x[:rows]), weight.codes, weight.scales, y)
        results.append(y.numpy())
    for y in results:
        np.testing.assert_array_equal(y, results[-1][: len(y)])
    assert relative_error(results[-1], x @ weight.value.T) < 3e-6


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("n", "k"), [(40, 96), (33, 50), (16, 1100)])
def test_product_with_stored_floats(n, k, dtype):
    isa, rng = cpu_target().isa, np.random.default_rng(3)
    w, x = rng.standard_normal((n, k)).astype(dtype), rng.standard_normal((70, k)).astype(np.float32)
    blocks = empty(weight_blocks.num_blocks(n), k, weight_blocks.BLOCK, dtype=dtype)
    build(weight_blocks.prepare_blocks(n, k, dtype))(tensor(w), blocks)
    product = build(linear.linear_float(n, k, dtype, isa))
    results = []
    for rows in (1, 3, 70):
        y = empty(rows, n)
        product(tensor(x[:rows]), blocks, y)
        results.append(y.numpy())
    for y in results:
        np.testing.assert_array_equal(y, results[-1][: len(y)])
    assert relative_error(results[-1], x @ w.astype(np.float32).T) < 3e-6
    ids, rows = np.array([0, n - 1, 5, 5], np.int32), empty(4, k)
    build(weight_blocks.embedding(n, k, dtype, isa))(tensor(ids), blocks, rows)
    np.testing.assert_array_equal(rows.numpy(), w[ids].astype(np.float32))


def test_embedding_of_int4_rows_stays_in_the_table():
    n, k = 40, 96
    weight, ids, rows = Int4Weight(n, k), np.array([0, 39, 17, 3, 1000, -4], np.int32), empty(6, k)
    build(weight_blocks.embedding(n, k, "int4", cpu_target().isa))(
        tensor(ids), weight.codes, weight.scales, rows
    )
    np.testing.assert_array_equal(rows.numpy(), weight.value[np.clip(ids, 0, n - 1)])


def check_pointwise(make, x: np.ndarray, weights: list[np.ndarray], dim: int, expected: np.ndarray) -> None:
    """The kernel of ``make(quantize)`` against ``expected``, one row at a time too, plain and quantized."""
    plain, quantizing = build(make(False)), build(make(True))
    out, one = empty(len(x), dim), empty(1, dim)
    plain(tensor(x), *map(tensor, weights), out)
    plain(tensor(x[:1]), *map(tensor, weights), one)
    np.testing.assert_allclose(out.numpy(), expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(out.numpy()[:1], one.numpy())
    words, again = (empty(len(x), activations.quantized_width(dim), dtype="int32") for _ in range(2))
    quantizing(tensor(x), *map(tensor, weights), words)
    build(activations.quantize_rows(dim, cpu_target().isa))(out, again)
    np.testing.assert_array_equal(words.numpy(), again.numpy())


@pytest.mark.parametrize("dim", [96, 576])
def test_rms_norm(dim):
    rng = np.random.default_rng(4)
    x, weight = rng.standard_normal((70, dim)).astype(np.float32) * 5, rng.random(dim).astype(np.float32)
    expected = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    check_pointwise(
        lambda quantize: rms_norm(dim, 1e-5, cpu_target().isa, quantize), x, [weight], dim, expected
    )


def test_silu_gate_far_from_zero():
    x = np.random.default_rng(5).standard_normal((9, 128)).astype(np.float32) * 20
    x[0, :4] = [-200, 200, 0, -88]
    gate, up = x[:, :64].astype(np.float64), x[:, 64:]
    expected = gate / (1 + np.exp(-gate)) * up
    check_pointwise(lambda quantize: silu_gate(64, cpu_target().isa, quantize), x, [], 64, expected)
