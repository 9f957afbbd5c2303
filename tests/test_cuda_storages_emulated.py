"""The plain CUDA products with weights of every storage: their CUDA source on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cuda_emulator import compiler, run
from kernel_rig import random_rows, relative_error
from kvq.quantization.storage import STORAGES, pack_codes
from kvq.schedules.cuda import linear
from kvq.schedules.cuda.backend import CudaKernels
from test_cuda_linear_emulated import execute, program

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

N_OUT, K, ROWS = 37, 96, 9


@pytest.mark.parametrize("storage", ["int4_zero", "int8_g16_min"])
def test_product_and_embedding(storage: str, tmp_path: Path) -> None:
    stored = random_rows(N_OUT, K, storage)
    arrays = {
        "w_ptr": pack_codes(stored.codes, STORAGES[storage].bits),
        "s_ptr": stored.scale,
        "z_ptr": stored.offset,
    }
    x = np.random.default_rng(0).standard_normal((ROWS, K)).astype(np.float32)
    out = np.full((ROWS, N_OUT), np.nan, np.float32)
    product = program(linear.linear(N_OUT, K, storage), tmp_path / "product", 0, linear.THREADS)
    blocks = [(column, row) for column in range(-(-N_OUT // 16)) for row in range(2)]
    found = execute(product, {"x_ptr": x, **arrays, "out_ptr": out}, ROWS, blocks)
    assert relative_error(found, x @ stored.dequantized().T) < 3e-6
    ids = np.array([0, N_OUT - 1, 5, N_OUT + 3, -1], np.int32)  # ids outside are the nearest row
    out = np.full((len(ids), K), np.nan, np.float32)
    rows = program(linear.embedding(N_OUT, K, storage), tmp_path / "rows", 0, linear.THREADS)
    found = execute(rows, {"ids_ptr": ids, **arrays, "out_ptr": out}, len(ids), [(i, 0) for i in range(5)])
    np.testing.assert_array_equal(found, stored.dequantized()[np.clip(ids, 0, N_OUT - 1)])


def test_a_product_with_experts(tmp_path: Path) -> None:
    """The portable kernel, as CUDA has it."""
    num, top, n_out, k, count = 3, 2, 40, 64, 3
    stored, rng = random_rows(num * n_out, k, "int4"), np.random.default_rng(1)
    x, experts = rng.standard_normal((count, k)).astype(np.float32), rng.integers(0, num, (count, top))
    arrays = {"x_ptr": x, "w_ptr": pack_codes(stored.codes, 4), "s_ptr": stored.scale}
    func = CudaKernels(("sm_90",)).expert_linear(n_out, k, num, top, True, "int4")
    made = program(func, tmp_path / "experts", 0, 256)
    out = np.full((count, top, n_out), np.nan, np.float32)
    chosen = {"experts_ptr": experts.astype(np.int32), "y_ptr": out}
    names = made.with_suffix(".args").read_text().split()
    found = run(
        made,
        {**{name: count for name in names}, **arrays, **chosen},
        [(0, slot) for slot in range(count * top)],
    )["y_ptr"]
    matrices = stored.dequantized().reshape(num, n_out, k)[experts]
    assert relative_error(found, np.einsum("nk,ntok->nto", x, matrices)) < 3e-6
