"""Matrix products, embedding and pointwise kernels against numpy; the same bits for any number of rows."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_rig import build, gated, random_rows, relative_error, tensor
from kvq.compiler.target import cpu_target
from kvq.passes.lower_weights import WeightPlan
from kvq.quantization.storage import STORAGES, pack_codes
from kvq.schedules.cpu import activations, embedding, linear, linear_q8, weight_blocks
from kvq.schedules.cpu.pointwise import gate, rms_norm
from kvq.schedules.cpu.vector import CpuIsa

ROWS = (1, 2, 7, 16, 64, 512)
SHAPES = [(96, 64), (40, 96), (200, 1536)]


def empty(*shape: int, dtype: str = "float32"):
    return tensor(np.full(shape, 77, dtype))


#: Each number of bits, size of group and offset, the last two with either number of bits.
KINDS = ["int4_min", "int4_zero", "int4_g16", "int8", "int8_g16_min"]


class Weight:
    """A random weight, stored and prepared."""

    def __init__(self, n: int, k: int, storage: str = "int4") -> None:
        rows, kernels = random_rows(n, k, storage), cpu_target().kernels
        self.value = rows.dequantized()
        plan = WeightPlan(kernels)
        plan.add("w.weight", (n, k), storage)
        stored = {"w.q_weight": pack_codes(rows.codes, STORAGES[storage].bits), "w.q_scale": rows.scale}
        if rows.offset is not None:
            stored[f"w.q_{STORAGES[storage].offset}"] = rows.offset
        self.tensors = []
        for prepared in plan.tensors:
            self.tensors.append(empty(*prepared.shape, dtype=prepared.dtype))
            build(plan.prepare[prepared.function][0])(tensor(stored.pop(prepared.source)), self.tensors[-1])
        assert not stored


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
    weight = Weight(n, k, storage)
    x = rng.standard_normal((512, k)).astype(np.float32) * 3
    residual = rng.standard_normal((512, n)).astype(np.float32)
    x[5, :32] = 0
    x[6, :64] = np.repeat([8, -8], 32)  # the largest products, all of one sign
    quantize = build(activations.quantize_rows(k, isa))
    product = build(linear_q8.linear_q8(n, k, storage, isa))
    product_add = build(linear_q8.linear_q8(n, k, storage, isa, residual=True))
    results = []
    for rows in ROWS:
        words = empty(rows, activations.quantized_width(k), dtype="int32")
        y, added = empty(rows, n), empty(rows, n)
        quantize(tensor(x[:rows]), words)
        product(words, *weight.tensors, y)
        product_add(words, *weight.tensors, tensor(residual[:rows]), added)
        np.testing.assert_array_equal(added.numpy(), y.numpy() + residual[:rows])
        results.append((y.numpy(), words.numpy()))
    for y, words in results:
        np.testing.assert_array_equal(y, results[-1][0][: len(y)])
        np.testing.assert_array_equal(words, results[-1][1][: len(y)])
    codes, scales, sums = unpack_quantized(results[-1][1], k)
    np.testing.assert_array_equal(sums, codes.reshape(512, -1, 16).sum(axis=2, dtype=np.int32))
    inputs = (codes.reshape(512, -1, 32) * scales[..., None]).reshape(512, k)
    assert np.abs(inputs - x).max() <= np.abs(x).max() / 127 / 2 * 1.01
    np.testing.assert_array_equal(inputs[5, :32], 0)
    assert relative_error(results[-1][0], inputs @ weight.value.T) < 3e-6


@pytest.mark.parametrize(
    ("opt", "shape", "storage"),
    [
        *((opt, shape, "int4") for opt in ("O0", "O1") for shape in SHAPES),
        *(("O1", (40, 96), storage) for storage in KINDS),
    ],
)
def test_exact_product_and_embedding(opt, shape, storage):
    (n, k), isa = shape, cpu_target(opt).isa
    weight = Weight(n, k, storage)
    x = np.random.default_rng(2).standard_normal((512, k)).astype(np.float32)
    product = build(linear.linear(n, k, storage, isa), opt)
    results = []
    for rows in ROWS:
        y = empty(rows, n)
        product(tensor(x[:rows]), *weight.tensors, y)
        results.append(y.numpy())
    for y in results:
        np.testing.assert_array_equal(y, results[-1][: len(y)])
    assert relative_error(results[-1], x @ weight.value.T) < 3e-6
    eye = np.eye(k, dtype=np.float32)[: min(k, 64)]
    y = empty(len(eye), n)
    product(tensor(eye), *weight.tensors, y)
    np.testing.assert_array_equal(y.numpy(), weight.value.T[: len(eye)])  # no weight is rounded
    ids, rows = np.array([0, n - 1, 17, 3, 1000, -4], np.int32), empty(6, k)
    build(embedding.embedding(n, k, storage), opt)(tensor(ids), *weight.tensors, rows)
    np.testing.assert_array_equal(rows.numpy(), weight.value[np.clip(ids, 0, n - 1)])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("n", "k"), [(40, 96), (33, 50), (16, 1100)])
def test_product_with_stored_floats(n, k, dtype):
    isa, rng = cpu_target().isa, np.random.default_rng(3)
    w, x = rng.standard_normal((n, k)).astype(dtype), rng.standard_normal((70, k)).astype(np.float32)
    blocks = empty(weight_blocks.num_blocks(n), k, weight_blocks.BLOCK, dtype=dtype)
    build(weight_blocks.prepare_blocks(n, k, dtype))(tensor(w), blocks)
    product = build(linear.linear(n, k, dtype, isa))
    results = []
    for rows in (1, 3, 70):
        y = empty(rows, n)
        product(tensor(x[:rows]), blocks, y)
        results.append(y.numpy())
    for y in results:
        np.testing.assert_array_equal(y, results[-1][: len(y)])
    assert relative_error(results[-1], x @ w.astype(np.float32).T) < 3e-6
    ids, rows = np.array([0, n - 1, 5, 5], np.int32), empty(4, k)
    build(embedding.embedding(n, k, dtype))(tensor(ids), blocks, rows)
    np.testing.assert_array_equal(rows.numpy(), w[ids].astype(np.float32))


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


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_far_from_zero(activation):
    x = np.random.default_rng(5).standard_normal((9, 128)).astype(np.float32) * 20
    x[0, :4] = [-200, 200, 0, -88]
    expected = gated(x, activation)
    check_pointwise(lambda quantize: gate(64, activation, cpu_target().isa, quantize), x, [], 64, expected)
