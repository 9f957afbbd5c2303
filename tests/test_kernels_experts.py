"""The choice of experts, and products with their matrices, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from expert_cases import NUM, ROWS, TOP, chosen_experts, expected_routing, routing_logits
from kernel_backends import CPU, CpuBackend
from kernel_rig import relative_error
from kernel_weights import Weight
from kvq.compiler.target import cpu_target
from kvq.errors import CompileError
from kvq.schedules.cpu import experts


@pytest.mark.parametrize(("num", "top", "normalize"), [(5, 2, True), (130, 8, False)])
def test_routing(num: int, top: int, normalize: bool) -> None:
    logits = routing_logits(num)
    weights, chosen = np.full((ROWS, top), 77, np.float32), np.full((ROWS, top), 77, np.int32)
    CPU.build(experts.route_experts(num, top, normalize))(logits, weights, chosen)
    expected, order = expected_routing(logits, top, normalize)
    np.testing.assert_array_equal(chosen, order)
    np.testing.assert_allclose(weights, expected, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize(
    ("opt", "shared", "storage", "k"),
    [("O1", True, "int4", 544), ("O0", False, "int4_min", 96), ("O1", False, "float16", 96)],
)
def test_product(opt: str, shared: bool, storage: str, k: int) -> None:
    """More inputs than are float32 at a time; inputs shared by a row's experts, or one for each."""
    rng, n = np.random.default_rng(1), 48
    backend = CpuBackend(opt)
    weight = Weight(NUM * n, k, storage, backend)
    matrices = weight.value.reshape(NUM, n, k)
    chosen = chosen_experts(rng)
    x = rng.standard_normal((ROWS, k) if shared else (ROWS, TOP, k)).astype(np.float32)
    kernel = backend.build(backend.kernels.expert_linear(n, k, NUM, TOP, shared, storage))
    results = []
    for rows in (1, 7, ROWS):
        y = np.full((rows, TOP, n), 77, np.float32)
        kernel(x[:rows], *weight.tensors, chosen[:rows], y)
        results.append(y)
    for y in results:
        np.testing.assert_array_equal(y, results[-1][: len(y)])
    inputs = np.repeat(x[:, None], TOP, axis=1) if shared else x
    assert relative_error(results[-1], np.einsum("ijk,ijnk->ijn", inputs, matrices[chosen])) < 3e-6


def test_widths_that_no_block_fits_are_refused() -> None:
    with pytest.raises(CompileError, match="experts of 40 outputs"):
        experts.expert_linear(40, 64, NUM, TOP, True, "float32", cpu_target().isa)
