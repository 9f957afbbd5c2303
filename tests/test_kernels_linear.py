"""Products, embeddings and pointwise kernels of every backend against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_backends import BACKENDS, KernelBackend, kernel, present
from kernel_rig import gated, relative_error
from kernel_weights import Weight
from kvq.quantization.storage import STORAGES

#: Outputs and inputs: no whole number of blocks, and inputs beyond a tile.
SHAPES = [(40, 96), (133, 64), (37, 1056)]
CASES = [(*SHAPES[i % len(SHAPES)], storage) for i, storage in enumerate(STORAGES)]


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    return present(request.param)


@pytest.mark.parametrize(("n", "k", "storage"), CASES)
def test_product_and_embedding_of_every_storage(backend, n, k, storage):
    weight, product = Weight(n, k, storage, backend), kernel(backend, "linear", n, k, storage)
    x = np.random.default_rng(2).standard_normal((70, k)).astype(np.float32)
    for rows in (1, 3, 70):
        y = np.full((rows, n), np.nan, np.float32)
        product(x[:rows], *weight.tensors, y)
        assert relative_error(y, x[:rows] @ weight.value.T) < 3e-6
    eye = np.eye(k, dtype=np.float32)[: min(k, 64)]
    y = np.full((len(eye), n), np.nan, np.float32)
    product(eye, *weight.tensors, y)
    np.testing.assert_array_equal(y, weight.value.T[: len(eye)])  # no weight is rounded
    ids, rows = np.array([0, n - 1, 17, 3, 1000, -4], np.int32), np.full((6, k), np.nan, np.float32)
    kernel(backend, "embedding", n, k, storage)(ids, *weight.tensors, rows)
    np.testing.assert_array_equal(rows, weight.value[np.clip(ids, 0, n - 1)])


@pytest.mark.parametrize("dim", [96, 576])
def test_rms_norm(backend, dim):
    rng = np.random.default_rng(4)
    x, weight = rng.standard_normal((70, dim)).astype(np.float32) * 5, rng.random(dim).astype(np.float32)
    expected = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    for rows in (70, 1):
        out = np.full((rows, dim), np.nan, np.float32)
        kernel(backend, "rms_norm", dim, 1e-5)(x[:rows], weight, out)
        np.testing.assert_allclose(out, expected[:rows], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_far_from_zero(backend, activation):
    x = np.random.default_rng(5).standard_normal((9, 128)).astype(np.float32) * 20
    x[0, :4] = [-200, 200, 0, -88]
    out = np.full((9, 64), np.nan, np.float32)
    kernel(backend, "gate", 64, activation)(x, out)
    np.testing.assert_allclose(out, gated(x, activation), rtol=5e-6, atol=5e-6)
