"""Mixtures of experts on a CUDA GPU, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from cuda_rig import gpu, kernel, stored_weight, tensor
from expert_cases import NUM, ROWS, TOP, chosen_experts, expected_routing, routing_logits
from kernel_rig import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpu() is None, reason="no CUDA device")]

#: Experts, how many a row uses, whether their weights add up to one.
ROUTING = [(5, 2, True), (130, 8, False)]
#: Whether a row's experts share its inputs, the storage, and inputs.
PRODUCTS = [
    (shared, storage, k)
    for storage, k in (("int4", 544), ("int4_min", 96), ("int8_g16", 96), ("float16", 96))
    for shared in (True, False)
]
N_OUT = 48
#: Everything that the tests build: the backend's method and its arguments.
NEEDED = [
    *(("route_experts", *case) for case in ROUTING),
    *(("expert_linear", N_OUT, k, NUM, TOP, shared, storage) for shared, storage, k in PRODUCTS),
]


@pytest.mark.parametrize(("num", "top", "normalize"), ROUTING)
def test_routing(num, top, normalize):
    logits = routing_logits(num)
    weights, chosen = tensor(np.full((ROWS, top), 77, np.float32)), tensor(np.full((ROWS, top), 77, np.int32))
    kernel("route_experts", num, top, normalize)(tensor(logits), weights, chosen)
    expected, order = expected_routing(logits, top, normalize)
    np.testing.assert_array_equal(chosen.numpy(), order)
    np.testing.assert_allclose(weights.numpy(), expected, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize(("shared", "storage", "k"), PRODUCTS)
def test_product(shared, storage, k):
    rng = np.random.default_rng(1)
    stored, weight = stored_weight(NUM * N_OUT, k, storage, rng)
    chosen = chosen_experts(rng)
    x = rng.standard_normal((ROWS, k) if shared else (ROWS, TOP, k)).astype(np.float32)
    product = kernel("expert_linear", N_OUT, k, NUM, TOP, shared, storage)
    found = {}
    for rows in (1, 7, ROWS):
        out = tensor(np.full((rows, TOP, N_OUT), np.nan, np.float32))
        product(tensor(x[:rows]), *stored, tensor(chosen[:rows]), out)
        found[rows] = out.numpy()
    inputs = np.repeat(x[:, None], TOP, axis=1) if shared else x
    expected = np.einsum("ijk,ijnk->ijn", inputs, weight.reshape(NUM, N_OUT, k)[chosen])
    assert relative_error(found[ROWS], expected) < 3e-6
    for rows, part in found.items():
        np.testing.assert_array_equal(part, found[ROWS][:rows])
