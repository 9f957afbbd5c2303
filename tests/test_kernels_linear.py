"""Matrix products, embedding and pointwise kernels against numpy; the same bits for any number of rows."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_rig import build, relative_error, tensor
from kvq.compiler.target import cpu_target
from kvq.quantization.weights import dequantize_q4f16_1, quantize_q4f16_1
from kvq.schedules.cpu import linear
from kvq.schedules.cpu.pointwise import rms_norm, silu_gate
from kvq.schedules.cpu.vector import CpuIsa

ROWS = (1, 2, 7, 16, 64, 512)
SHAPES = [(96, 64), (40, 96), (200, 576), (48, 1536)]


def empty(*shape: int, dtype: str = "float32"):
    return tensor(np.full(shape, 77, dtype))


class Int4Weight:
    """A random weight, stored and prepared."""

    def __init__(self, n: int, k: int) -> None:
        rng = np.random.default_rng(n + k)
        codes, scales = quantize_q4f16_1(rng.standard_normal((n, k)).astype(np.float32))
        self.value = dequantize_q4f16_1(codes, scales)
        blocks, groups = linear.num_blocks(n), k // linear.GROUP
        self.codes = empty(blocks, groups, 4, linear.BLOCK, dtype="uint32")
        self.scales = empty(blocks, groups, linear.BLOCK, dtype="float16")
        build(linear.prepare_int4_codes(n, k))(tensor(codes), self.codes)
        build(linear.prepare_blocks(n, groups, "float16"))(tensor(scales), self.scales)


def quantized(x: np.ndarray, isa: CpuIsa, kernel=None):
    n, k = x.shape
    kernel = kernel or build(linear.quantize_rows(k, isa))
    parts = empty(n, k // 4, dtype="int32"), empty(n, k // 32), empty(n, k // 32, dtype="int32")
    kernel(tensor(x), *parts)
    return parts


@pytest.mark.parametrize("isa", [cpu_target().isa, CpuIsa(8, "generic")], ids=["native", "generic"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int8_product(n, k, isa):
    weight = Int4Weight(n, k)
    x = np.random.default_rng(1).standard_normal((512, k)).astype(np.float32) * 3
    x[5, :32] = 0
    quantize, product = build(linear.quantize_rows(k, isa)), build(linear.linear_int8(n, k, isa))
    results = {}
    for rows in ROWS:
        codes, scales, offsets = quantized(x[:rows], isa, quantize)
        y = empty(rows, n)
        product(codes, scales, offsets, weight.codes, weight.scales, y)
        results[rows] = (y.numpy(), codes.numpy())
    for y, codes in results.values():
        np.testing.assert_array_equal(y, results[512][0][: len(y)])
        np.testing.assert_array_equal(codes, results[512][1][: len(y)])
    activations = codes.view(np.int8).reshape(512, -1, 32) * scales.numpy()[..., None]
    assert np.abs(activations.reshape(512, k) - x).max() <= np.abs(x).max() / 127 / 2 * 1.01
    expected = activations.reshape(512, k).astype(np.float32) @ weight.value.T
    assert relative_error(results[512][0], expected) < 3e-6
    np.testing.assert_array_equal(activations[5, 0], 0)


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
    blocks = empty(linear.num_blocks(n), k, linear.BLOCK, dtype=dtype)
    build(linear.prepare_blocks(n, k, dtype))(tensor(w), blocks)
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
    build(linear.embedding(n, k, dtype, isa))(tensor(ids), blocks, rows)
    np.testing.assert_array_equal(rows.numpy(), w[ids].astype(np.float32))


def test_embedding_of_int4_rows_stays_in_the_table():
    n, k = 40, 96
    weight, ids, rows = Int4Weight(n, k), np.array([0, 39, 17, 3, 1000, -4], np.int32), empty(6, k)
    build(linear.embedding(n, k, "int4", cpu_target().isa))(tensor(ids), weight.codes, weight.scales, rows)
    np.testing.assert_array_equal(rows.numpy(), weight.value[np.clip(ids, 0, n - 1)])


@pytest.mark.parametrize("dim", [48, 576])
def test_rms_norm(dim):
    rng = np.random.default_rng(4)
    x, weight = rng.standard_normal((70, dim)).astype(np.float32) * 5, rng.random(dim).astype(np.float32)
    kernel = build(rms_norm(dim, 1e-5, cpu_target().isa))
    out, one = empty(70, dim), empty(1, dim)
    kernel(tensor(x), tensor(weight), out)
    kernel(tensor(x[:1]), tensor(weight), one)
    expected = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    assert relative_error(out.numpy(), expected) < 1e-6
    np.testing.assert_array_equal(out.numpy()[:1], one.numpy())


def test_silu_gate_far_from_zero():
    x = np.random.default_rng(5).standard_normal((9, 96)).astype(np.float32) * 20
    x[0, :4] = [-200, 200, 0, -88]
    out = empty(9, 48)
    build(silu_gate(48, cpu_target().isa))(tensor(x), out)
    gate, up = x[:, :48].astype(np.float64), x[:, 48:]
    expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(out.numpy(), expected, rtol=2e-6, atol=1e-6)
