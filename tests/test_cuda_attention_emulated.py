"""The decode kernel's CUDA source on the CPU: right, and within its arrays, without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from cuda_attention import GEOMETRIES
from cuda_emulator import build, compiler, run
from kvq.bench.attention_case import AttentionCase
from kvq.compiler.target import cuda_target
from kvq.runtime.decode_plan import DecodeDevice
from kvq.schedules.attention_variant import AttentionVariant
from kvq.schedules.cuda.paged_attention import _Decode, decode_tuning, paged_attention_decode
from kvq.schedules.cuda.prefill_attention import prefill_attention
from kvq.schedules.cuda.prefill_warp import WARPS, Place

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

#: Tiles that straddle packed words, more heads than warps and than a block takes, the plainest.
NAMES = ("int3 head_dim 80", "int4 group of 12, head_dim 96", "int4 page 32")


def source_of(func) -> str:
    target = cuda_target("sm_90")
    module = tvm.IRModule({"attention": func.with_attr("global_symbol", "attention")})
    built = tvm.compile(module, target=target.target, tir_pipeline=target.tir_pipeline)
    return built.mod.imports[0].inspect_source("cuda")


@pytest.fixture(scope="module", params=NAMES, ids=lambda name: name.replace(" ", "-"))
def kernel(request, tmp_path_factory):
    layout, group = GEOMETRIES[request.param]
    heads = group * layout.num_kv_heads
    tuning = decode_tuning(layout, heads, ["sm_90"])
    source = source_of(paged_attention_decode(layout, heads, "float16", tuning))
    shape = _Decode(layout, heads, "float16", tuning)
    directory = tmp_path_factory.mktemp("emulated")
    program = build(source, directory, shape.shared_bytes, tuning.warps * 32)
    return program, layout, heads, shape.parts


def launch(program, case: AttentionCase, columns: int):
    arguments = {
        "q_ptr": case.q,
        "pool_ptr": case.pool,
        "kv_open_ptr": case.rows,
        "kv_workspace_ptr": np.zeros(1, np.float16),
        "positions_ptr": case.positions,
        "table_ptr": case.table,
        "counts_ptr": case.counts,
        "tasks_ptr": case.tasks,
        "scratch_ptr": case.scratch[: max(1, len(case.tasks))],
        "out_ptr": np.full(case.q.shape, np.nan, np.float16),
        "layer": 0,
        "num_tasks": len(case.tasks),
        "num_open": len(case.rows),
    }
    blocks = [(x, y) for x in range(columns) for y in range(len(case.tasks))]
    order = np.random.default_rng(0).permutation(len(blocks))
    return run(program, arguments, [blocks[i] for i in order])


@pytest.mark.parametrize("lengths", [[1], [150, 64, 65, 3], [1500], [5300]], ids=str)
def test_equals_numpy_within_its_arrays(kernel, lengths):
    program, layout, heads, parts = kernel
    if lengths[0] > 5000 and layout.page_size > 32:
        pytest.skip("more than 32 parts are tried once")
    columns = layout.num_kv_heads * parts
    device = DecodeDevice.of(layout, heads, 264, warps=4)
    case = AttentionCase(layout, heads, lengths, device, seed=len(lengths))
    after = launch(program, case, columns)
    assert case.error(after["out_ptr"], samples=8) <= 2e-3
    assert not after["scratch_ptr"][:, :, layout.head_dim + 2].any(), "a counter was not reset"
    assert lengths[0] < 1000 or len(case.tasks) > (32 if lengths[0] > 5000 else 1)


def test_layers_with_windows_take_the_plan_of_decode(tmp_path):
    """Of a row's parts the first computes the whole; a window that leaves all is no window."""
    layout, group = GEOMETRIES["int4 page 32"]
    heads = group * layout.num_kv_heads
    func = prefill_attention(layout, heads, "float16", AttentionVariant(window=10_000), single_rows=True)
    program = build(source_of(func), tmp_path, Place(layout).shared_bytes, WARPS * 32)
    case = AttentionCase(layout, heads, [1500, 31, 33], DecodeDevice.of(layout, heads, 264, warps=4))
    assert max(case.tasks[:, 7]) > 0, "no row in parts"
    after = launch(program, case, layout.num_kv_heads)
    assert case.error(after["out_ptr"], samples=6) <= 2e-3
