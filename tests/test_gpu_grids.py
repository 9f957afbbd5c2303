"""More workgroups than a GPU starts along a dimension go along two."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.s_tir import dlight

from kernel_backends import BACKENDS
from kvq.compiler.bound_grids import BoundGrids
from kvq.compiler.gpu_target import gpu_target
from kvq.schedules.gpu.block import MOST_GROUPS


@pytest.fixture
def wgsl():
    found = next(b for b in BACKENDS if b.name == "wgsl")
    if reason := found.missing():
        pytest.skip(reason)
    return found


@pytest.mark.parametrize("rows", [1, 74, 3000])
def test_a_kernel_that_tvm_schedules(wgsl, rows):
    """One, as many as fit along x, and far more, of which the last ones have nothing to do."""
    builder, n = relax.BlockBuilder(), tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 7), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.add(x, relax.const(np.float32(1)))))
    with gpu_target("webgpu").target:
        passes = relax.transform.LegalizeOps(), dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())
        mod = tvm.transform.Sequential([*passes, BoundGrids(2)])(builder.get())
    given = np.random.default_rng(0).random((rows, 7), np.float32)
    out = np.full_like(given, np.nan)
    wgsl.build(mod["add"])(given, out)
    np.testing.assert_array_equal(out, given + 1)


def test_more_rows_than_a_dimension_has(wgsl):
    x = np.random.default_rng(0).standard_normal((MOST_GROUPS + 5, 8)).astype(np.float32)
    out = np.full_like(x, np.nan)
    wgsl.build(wgsl.kernels.rms_norm(8, 1e-6))(x, np.ones(8, np.float32), out)
    np.testing.assert_allclose(out, x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6), rtol=2e-6)
