"""Products of one to four rows on tensor cores: their CUDA source on the CPU, right and within its arrays."""

from __future__ import annotations

import numpy as np
import pytest
from ml_dtypes import bfloat16

from cuda_emulator import compiler
from kernel_rig import relative_error
from kvq.schedules.backend import ROUNDED, RowSource
from kvq.schedules.cuda.gemv import Gemv, fits, gemv
from kvq.schedules.cuda.gemv_rows import MOST_ROWS
from kvq.schedules.cuda.gemv_tuning import GemvTuning, gemv_tuning
from test_cuda_linear_emulated import K, execute, make_weight, program

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

EPS = 1e-2
ROUNDS, NORM = RowSource(rounded=False), RowSource(rounded=False, eps=EPS)


def normalized(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(1, keepdims=True) + EPS) * gain


@pytest.mark.parametrize(
    ("storage", "n_out", "rows", "tuning", "residual", "activation", "dtype"),
    [
        # tiles and units that blocks and warps cannot share evenly
        ("int4", 96, NORM, GemvTuning(4, 1, 4, 2), True, None, "bfloat16"),
        ("int4", 96, ROUNDS, GemvTuning(4, 2, 2, 3), False, "silu", "float16"),
        ("float16", 72, ROUNDED, GemvTuning(4, 2, 1, 1), False, None, "float16"),
    ],
    ids=["norm-bf16", "rounds-gate", "rounded"],
)
def test_gemv(storage, n_out, rows, tuning, residual, activation, dtype, tmp_path):
    tensors, values = make_weight(tmp_path, storage, n_out, dtype)
    kernel = Gemv(n_out, K, storage, tuning, rows, activation, dtype)
    made = program(gemv(kernel, residual), tmp_path / "gemv", kernel.shared_bytes, tuning.threads)
    rng, operand = np.random.default_rng(1), np.float16 if dtype == "float16" else bfloat16
    gain = rng.standard_normal(K).astype(np.float32)
    many = rng.standard_normal((MOST_ROWS, K)).astype(operand if rows.rounded else np.float32)
    found = []
    for count in (1, MOST_ROWS):
        x, shape = many[:count], (count, n_out // 2 if activation else n_out)
        arrays = {
            "x_ptr": x,
            **tensors,
            "out_ptr": np.full(shape, np.nan, operand if activation else np.float32),
        }
        if rows.eps is not None:
            arrays["gain_ptr"] = gain
        if residual:
            arrays["residual_ptr"] = np.full(shape, 0.5, np.float32)
        found.append(execute(made, arrays, count, [(i, 0) for i in range(kernel.blocks)]))
        plain = x.astype(np.float32)
        made_rows = plain if rows.eps is None else normalized(plain, gain)
        wanted = made_rows.astype(operand).astype(np.float32) @ values.T + (0.5 if residual else 0)
        if activation:
            first, second = np.split(wanted, 2, axis=1)
            wanted = first / (1 + np.exp(-first)) * second
        assert relative_error(found[-1].astype(np.float32), wanted) < 5e-4
    np.testing.assert_array_equal(found[0], found[1][:1])  # whoever shares the step


def test_every_shape_is_cut():
    """Blocks make every output; a GPU with little shared memory is not asked for more than it has."""
    shapes = ((576, 576, False), (4096, 14336, False), (10240, 8192, False), (57344, 8192, True))
    for archs, most in ((("sm_80", "sm_89"), 576), (("sm_90a",), 14336)):
        for n_out, k, gated in shapes:
            for storage in ("int4", "float16"):
                tuning = gemv_tuning(n_out, k, storage, gated, archs)
                kernel = Gemv(n_out, k, storage, tuning, activation="silu" if gated else None)
                assert kernel.blocks * kernel.run * tuning.passes >= kernel.lines
                assert fits(kernel, archs) or k > most
