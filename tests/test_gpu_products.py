"""What GPUs do in several ways, or alone: products by the number of rows, experts, the likeliest token."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_backends import BACKENDS, CPU, KernelBackend, present
from kernel_rig import relative_error
from kernel_weights import Weight


@pytest.fixture(params=[b for b in BACKENDS if b is not CPU], ids=lambda backend: backend.name)
def gpu(request: pytest.FixtureRequest) -> KernelBackend:
    return present(request.param)


@pytest.mark.parametrize(
    ("n", "k", "storage"),
    [(37, 1056, "int4"), (100, 104, "float16")],
)
def test_a_product_of_one_row_of_few_and_of_many(gpu, n, k, storage):
    """The last rows and outputs of a workgroup, and inputs that are no whole number of steps."""
    weight, kernel = Weight(n, k, storage, gpu), gpu.build(gpu.kernels.linear(n, k, storage))
    x, found = np.random.default_rng(1).standard_normal((70, k)).astype(np.float32), {}
    for rows in (1, 3, 32, 33, 70):
        found[rows] = np.full((rows, n), np.nan, np.float32)
        kernel(x[:rows], *weight.tensors, found[rows])
        assert relative_error(found[rows], x[:rows] @ weight.value.T) < 3e-6
    for less, more in ((1, 3), (3, 32), (33, 70)):  # kernels of one row and of few sum in the same order
        np.testing.assert_array_equal(found[less], found[more][:less])


@pytest.mark.parametrize(("shared", "storage"), [(True, "int4"), (False, "float16")])
def test_products_with_experts(gpu, shared, storage):
    n, k, experts, top, rows = 40, 64, 5, 2, 9
    weight, rng = Weight(n * experts, k, storage, gpu), np.random.default_rng(2)
    x = rng.standard_normal((rows, k) if shared else (rows, top, k)).astype(np.float32)
    chosen = rng.integers(0, experts, (rows, top)).astype(np.int32)
    out = np.full((rows, top, n), np.nan, np.float32)
    gpu.build(gpu.kernels.expert_linear(n, k, experts, top, shared, storage))(x, *weight.tensors, chosen, out)
    inputs = np.broadcast_to(x[:, None], (rows, top, k)) if shared else x
    matrices = weight.value.reshape(experts, n, k)[chosen]
    assert relative_error(out, np.einsum("ntk,ntok->nto", inputs, matrices)) < 3e-6


@pytest.mark.parametrize("normalize", [True, False])
def test_the_choice_of_experts(gpu, normalize):
    logits = np.random.default_rng(3).standard_normal((70, 8)).astype(np.float32) * 3
    logits[0], logits[1, 2] = 1, -200
    weights, experts = np.full((70, 3), np.nan, np.float32), np.full((70, 3), -1, np.int32)
    gpu.build(gpu.kernels.route_experts(8, 3, normalize))(logits, weights, experts)
    np.testing.assert_array_equal(experts, np.argsort(-logits, axis=1, kind="stable")[:, :3])
    likelihood = np.exp(logits - logits.max(axis=1, keepdims=True))
    picked = np.take_along_axis(likelihood, experts.astype(int), axis=1)
    total = picked if normalize else likelihood
    np.testing.assert_allclose(weights, picked / total.sum(axis=1, keepdims=True), rtol=2e-6)


@pytest.mark.parametrize(("vocab", "drawable"), [(1003, 1000), (100, 100)])
def test_likeliest(gpu, vocab, drawable):
    logits = np.random.default_rng(4).standard_normal((7, vocab)).astype(np.float32)
    logits[0, 3] = logits[0, 90] = 10  # of equals the first
    logits[1, 7], logits[2, 50] = np.nan, -np.inf
    logits[3, drawable - 1], logits[4, 0], logits[5] = 50, 50, -3e38
    logits[6, drawable:] = 99  # cannot be drawn
    out = np.full(7, -7, np.int32)
    gpu.build(gpu.kernels.find_tokens(vocab, drawable))(logits, out)
    best = logits[:, :drawable].argmax(axis=1)
    np.testing.assert_array_equal(out, np.where(np.isfinite(logits[:, :drawable]).all(axis=1), best, -1))
