"""The CPU's products: int8 activations, and the same bits for any number of rows."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_backends import CPU, CpuBackend
from kernel_rig import gated, relative_error
from kernel_weights import Weight
from kvq.compiler.target import cpu_target
from kvq.schedules.cpu import activations, embedding, linear, linear_q8, weight_blocks
from kvq.schedules.cpu.pointwise import gate, rms_norm
from kvq.schedules.cpu.vector import CpuIsa

ROWS = (1, 2, 7, 16, 64, 512)
SHAPES = [(96, 64), (40, 96), (200, 1536)]
#: Each number of bits, size of group and offset, the last two with either number of bits.
KINDS = ["int4_min", "int4_zero", "int4_g16", "int8", "int8_g16_min"]


def empty(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.full(shape, 77, dtype)


def unpack_quantized(words: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes int8 [n, K], scales float32 [n, K/32], sums int32 [n, K/16] of quantized rows."""
    codes, scales, sums = np.split(words, [k // 4, k // 4 + k // weight_blocks.GROUP], axis=1)
    return codes.copy().view(np.int8), scales.copy().view(np.float32), sums


ISAS = {"native": cpu_target().isa, "generic": CpuIsa(8, "generic")}


@pytest.mark.parametrize(
    ("isa", "shape", "storage"),
    [
        *(("native", shape, "int4") for shape in SHAPES),
        *(("native", (40, 96), storage) for storage in KINDS),
        *(("generic", (40, 96), storage) for storage in ("int4", "int8", "int8_g16_min")),
    ],
)
def test_product_with_int8_activations(isa, shape, storage):
    (n, k), isa, rng = shape, ISAS[isa], np.random.default_rng(1)
    weight = Weight(n, k, storage, CPU)
    x = rng.standard_normal((512, k)).astype(np.float32) * 3
    residual = rng.standard_normal((512, n)).astype(np.float32)
    x[5, :32] = 0
    x[6, :64] = np.repeat([8, -8], 32)  # the largest products, all of one sign
    quantize = CPU.build(activations.quantize_rows(k, isa))
    product = CPU.build(linear_q8.linear_q8(n, k, storage, isa))
    product_add = CPU.build(linear_q8.linear_q8(n, k, storage, isa, residual=True))
    results = []
    for rows in ROWS:
        words = empty(rows, activations.quantized_width(k), dtype="int32")
        y, added = empty(rows, n), empty(rows, n)
        quantize(x[:rows], words)
        product(words, *weight.tensors, y)
        product_add(words, *weight.tensors, residual[:rows], added)
        np.testing.assert_array_equal(added, y + residual[:rows])
        results.append((y, words))
    for y, words in results:
        np.testing.assert_array_equal(y, results[-1][0][: len(y)])
        np.testing.assert_array_equal(words, results[-1][1][: len(y)])
    codes, scales, sums = unpack_quantized(results[-1][1], k)
    np.testing.assert_array_equal(sums, codes.reshape(512, -1, 16).sum(axis=2, dtype=np.int32))
    inputs = (codes.reshape(512, -1, 32) * scales[..., None]).reshape(512, k)
    assert np.abs(inputs - x).max() <= np.abs(x).max() / 127 / 2 * 1.01
    np.testing.assert_array_equal(inputs[5, :32], 0)
    assert relative_error(results[-1][0], inputs @ weight.value.T) < 3e-6


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("opt", ["O0", "O1"])
def test_exact_product(opt, shape):
    (n, k), storage, backend = shape, "int4", CpuBackend(opt)
    weight = Weight(n, k, storage, backend)
    x = np.random.default_rng(2).standard_normal((512, k)).astype(np.float32)
    product = backend.build(backend.kernels.linear(n, k, storage))
    results = []
    for rows in ROWS:
        y = empty(rows, n)
        product(x[:rows], *weight.tensors, y)
        results.append(y)
    for y in results:
        np.testing.assert_array_equal(y, results[-1][: len(y)])
    assert relative_error(results[-1], x @ weight.value.T) < 3e-6


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("n", "k"), [(40, 96), (33, 50), (16, 1100)])
def test_product_with_stored_floats(n, k, dtype):
    isa, rng = cpu_target().isa, np.random.default_rng(3)
    w, x = rng.standard_normal((n, k)).astype(dtype), rng.standard_normal((70, k)).astype(np.float32)
    blocks = empty(weight_blocks.num_blocks(n), k, weight_blocks.BLOCK, dtype=dtype)
    CPU.build(weight_blocks.prepare_blocks(n, k, dtype))(w, blocks)
    product = CPU.build(linear.linear(n, k, dtype, isa))
    results = []
    for rows in (1, 3, 70):
        y = empty(rows, n)
        product(x[:rows], blocks, y)
        results.append(y)
    for y in results:
        np.testing.assert_array_equal(y, results[-1][: len(y)])
    assert relative_error(results[-1], x @ w.astype(np.float32).T) < 3e-6
    ids, rows = np.array([0, n - 1, 5, 5], np.int32), empty(4, k)
    CPU.build(embedding.embedding(n, k, dtype))(ids, blocks, rows)
    np.testing.assert_array_equal(rows, w[ids].astype(np.float32))


def check_pointwise(make, x: np.ndarray, weights: list[np.ndarray], dim: int, expected: np.ndarray) -> None:
    """The kernel of ``make(quantize)`` against ``expected``, one row at a time too, plain and quantized."""
    plain, quantizing = CPU.build(make(False)), CPU.build(make(True))
    out, one = empty(len(x), dim), empty(1, dim)
    plain(x, *weights, out)
    plain(x[:1], *weights, one)
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(out[:1], one)
    words, again = (empty(len(x), activations.quantized_width(dim), dtype="int32") for _ in range(2))
    quantizing(x, *weights, words)
    CPU.build(activations.quantize_rows(dim, cpu_target().isa))(out, again)
    np.testing.assert_array_equal(words, again)


@pytest.mark.parametrize("dim", [96, 576])
def test_rms_norm(dim):
    rng = np.random.default_rng(4)
    x, weight = rng.standard_normal((70, dim)).astype(np.float32) * 5, rng.random(dim).astype(np.float32)
    expected = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    check_pointwise(
        lambda quantize: rms_norm(dim, 1e-5, cpu_target().isa, quantize), x, [weight], dim, expected
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_far_from_zero(activation):
    x = np.random.default_rng(5).standard_normal((9, 128)).astype(np.float32) * 20
    x[0, :4] = [-200, 200, 0, -88]
    expected = gated(x, activation)
    check_pointwise(lambda quantize: gate(64, activation, cpu_target().isa, quantize), x, [], 64, expected)
