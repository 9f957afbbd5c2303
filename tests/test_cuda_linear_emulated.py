"""Products with weights on tensor cores: their CUDA source on the CPU, right and within its arrays."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from ml_dtypes import bfloat16

from cuda_emulator import build, compiler, run
from kernel_rig import in_operand_order, relative_error
from kvq.compiler.target import cuda_target
from kvq.quantization.weights import dequantize_q4f16_1, quantize_q4f16_1
from kvq.schedules.cuda import weight_fragments
from kvq.schedules.cuda.linear_few import FewTuning, linear_few
from kvq.schedules.cuda.linear_tiles import TileProduct, linear_tiles
from kvq.schedules.cuda.pointwise import round_rows
from kvq.schedules.cuda.tile_tuning import TileTuning

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

#: Outputs that are no whole number of tiles or blocks, units that warps cannot share evenly.
N_OUT, K = 72, 192
#: Products by warps and by groups of four; alone, and two blocks that share the inputs.
TILES = [
    TileTuning(output_tiles=2, row_tiles=2, output_warps=1, row_warps=2, input_warps=2, stages=2),
    TileTuning(output_tiles=2, row_tiles=4, output_warps=4, row_warps=1, input_warps=1, stages=3, wgmma=True),
    TileTuning(1, 4, 4, 1, input_warps=1, stages=3, splits=2, wgmma=True),
]
ROWS = 40
GATED = TileTuning(2, 4, output_warps=8, row_warps=1, input_warps=1, stages=3, wgmma=True)


def program(func, directory, shared_bytes: int, threads: int, cluster: int = 1):
    """The kernel, to run on the CPU."""
    target = cuda_target("sm_90")
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    built = tvm.compile(module, target=target.target, tir_pipeline=target.tir_pipeline)
    directory.mkdir()
    return build(built.mod.imports[0].inspect_source("cuda"), directory, shared_bytes, threads, cluster)


def prepare(directory, name: str, raw: np.ndarray, n: int, k: int, *dtype: str) -> np.ndarray:
    """A stored tensor in the order of fragments, by the kernel that does it."""
    func = getattr(weight_fragments, f"prepare_{name}")(n, k, *dtype)
    shape = getattr(weight_fragments, f"{name}_shape")(n, k)
    out = np.full(shape, 0xFF, np.uint16 if name == "scales" else np.uint32)
    threads = weight_fragments.THREADS
    blocks = [(i, 0) for i in range(-(-out.size // threads))]
    made = program(func, directory / name, 16, threads)
    return run(made, {"raw_ptr": raw, "out_ptr": out}, blocks)["out_ptr"]


#: Prepared codes by the number of outputs: the same for operands of every type.
CODES: dict[int, np.ndarray] = {}


def make_weight(directory, storage: str, n: int, dtype: str = "float16"):
    """The tensors of a weight in the order of fragments, by the names of kernels, and what they stand for."""
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((n, K)) / K**0.5).astype(np.float32)
    if storage == "float16":
        stored = values.astype(np.float16)
        tensors = {"weight_ptr": prepare(directory, "matrix", stored, n, K, dtype)}
        return tensors, stored.astype(dtype).astype(np.float32)
    codes, scales = quantize_q4f16_1(values)
    if n not in CODES:
        CODES[n] = prepare(directory, "codes", codes, n, K)
    tensors = {"codes_ptr": CODES[n], "scales_ptr": prepare(directory, "scales", scales, n, K, dtype)}
    return tensors, dequantize_q4f16_1(codes, scales.astype(dtype).astype(np.float32))


@pytest.fixture(scope="module", params=weight_fragments.KINDS)
def weight(request, tmp_path_factory):
    """Storage, tensors and values of a weight."""
    return request.param, *make_weight(tmp_path_factory.mktemp("prepared"), request.param, N_OUT)


def execute(made, arrays: dict[str, np.ndarray], rows: int, blocks) -> np.ndarray:
    """``out`` after the kernel; beside arrays it takes the number of rows, whatever the compiler calls it."""
    names = made.with_suffix(".args").read_text().split()
    return run(made, {**{name: rows for name in names}, **arrays}, blocks)["out_ptr"]


def ends(count: int, residual: bool) -> dict[str, np.ndarray]:
    """The result's place, and the residual if there is one."""
    out = {"out_ptr": np.full((count, N_OUT), np.nan, np.float32)}
    return {**out, "residual_ptr": np.full((count, N_OUT), 0.5, np.float32)} if residual else out


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, K)).astype(np.float16)


def expected(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) @ values.T


def test_few_rows(weight, tmp_path):
    storage, tensors, values = weight
    residual = storage == "int4"
    tuning = FewTuning(warps=2, ahead=2)
    func = linear_few(N_OUT, K, storage, tuning, residual)
    made = program(func, tmp_path / "few", 16, tuning.warps * 32)
    for count in (1, 8, 13):
        x = rows(count)
        blocks = [(i, 0) for i in range(weight_fragments.tiles(N_OUT))]
        out = execute(made, {"x_ptr": x, **tensors, **ends(count, residual)}, count, blocks)
        assert relative_error(out - (0.5 if residual else 0), expected(x, values)) < 5e-4


@pytest.mark.parametrize("tuning", TILES, ids=["warps", "groups", "cluster"])
def test_many_rows(weight, tuning, tmp_path):
    storage, tensors, values = weight
    residual = storage != "int4"
    func = linear_tiles(N_OUT, K, storage, tuning, residual)
    shared_bytes = TileProduct(N_OUT, K, storage, tuning).shared_bytes
    made = program(func, tmp_path / "tiles", shared_bytes, tuning.threads, tuning.splits)
    x = rows(ROWS)
    columns, lines = -(-N_OUT // tuning.outputs), -(-ROWS // tuning.rows)
    blocks = [(i, j) for j in range(columns) for i in range(lines)]
    if tuning.splits > 1:
        blocks = [(0, *block) for block in blocks]
    out = execute(made, {"x_ptr": in_operand_order(x), **tensors, **ends(ROWS, residual)}, ROWS, blocks)
    assert relative_error(out - (0.5 if residual else 0), expected(x, values)) < 5e-4


@pytest.mark.parametrize(
    ("storage", "tuning"), [("int4", None), ("float16", TILES[1])], ids=["few-int4", "groups-float16"]
)
def test_rows_beyond_fp16(storage, tuning, tmp_path):
    """Products of bf16 operands: to the rounding of a code times a scale, otherwise exact."""
    tensors, values = make_weight(tmp_path, storage, N_OUT, "bfloat16")
    count = 5 if tuning is None else ROWS
    x = rows(count).astype(np.float32)
    x[:, 7], x[1::2] = 1e6, x[1::2] * 1e6
    x = x.astype(bfloat16)
    if tuning is None:
        tuning, blocks = FewTuning(warps=2, ahead=2), [(i, 0) for i in range(weight_fragments.tiles(N_OUT))]
        func = linear_few(N_OUT, K, storage, tuning, dtype="bfloat16")
        made = program(func, tmp_path / "few", 16, tuning.warps * 32)
        given = x
    else:
        func = linear_tiles(N_OUT, K, storage, tuning, dtype="bfloat16")
        shared_bytes = TileProduct(N_OUT, K, storage, tuning, dtype="bfloat16").shared_bytes
        made = program(func, tmp_path / "tiles", shared_bytes, tuning.threads)
        columns, lines = -(-N_OUT // tuning.outputs), -(-ROWS // tuning.rows)
        blocks = [(i, j) for j in range(columns) for i in range(lines)]
        given = in_operand_order(x)
    out = execute(made, {"x_ptr": given.view(np.uint16), **tensors, **ends(count, False)}, count, blocks)
    for row, wanted in zip(out, expected(x, values), strict=True):
        assert relative_error(row, wanted) < (3e-3 if storage == "int4" else 1e-5)


def test_rounding_to_bf16(tmp_path):
    made = program(round_rows(64, "bfloat16"), tmp_path / "round", 16, 256)
    x = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32) * 300
    x[:, :5] = 1e6, -3e38, np.nan, 1e-30, 1.00390625  # the last lies between two
    out = execute(made, {"x_ptr": x, "out_ptr": np.zeros(x.shape, np.uint16)}, 2, [(0, 0), (0, 1)])
    found, wanted = (rounded.astype(np.float32) for rounded in (out.view(bfloat16), x.astype(bfloat16)))
    np.testing.assert_array_equal(found, wanted)


def test_gated(tmp_path):
    half = 64  # a unit of the product behind; half of the block's tiles are not there
    tensors, values = make_weight(tmp_path, "int4", 2 * half)
    func = linear_tiles(2 * half, K, "int4", GATED, activation="silu")
    shared_bytes = TileProduct(2 * half, K, "int4", GATED, "silu").shared_bytes
    made = program(func, tmp_path / "gated", shared_bytes, GATED.threads)
    x = rows(ROWS)
    out = {"out_ptr": np.full((ROWS, half), np.nan, np.float16)}
    blocks = [(i, 0) for i in range(-(-ROWS // GATED.rows))]
    found = execute(made, {"x_ptr": in_operand_order(x), **tensors, **out}, ROWS, blocks)
    first, second = np.split(expected(x, values), 2, axis=1)
    wanted = first / (1 + np.exp(-first)) * second
    assert relative_error(found.astype(np.float32), in_operand_order(wanted)) < 1e-3


def test_rows_of_the_weight(weight, tmp_path):
    storage, tensors, values = weight
    made = program(
        weight_fragments.embedding(N_OUT, K, storage), tmp_path / "rows", 16, weight_fragments.THREADS
    )
    ids = np.array([0, N_OUT - 1, 5, 9, N_OUT + 3, -1], np.int32)  # ids outside are the nearest row
    out = np.full((len(ids), K), np.nan, np.float32)
    found = execute(made, {"ids_ptr": ids, **tensors, "out_ptr": out}, len(ids), [(i, 0) for i in range(6)])
    np.testing.assert_array_equal(found, values[np.clip(ids, 0, N_OUT - 1)])
