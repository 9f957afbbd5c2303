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
from kvq.schedules.cuda.paged_attention import _Decode, decode_tuning, paged_attention_decode

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

#: Tiles that straddle packed words, more heads than warps and than a block takes, the plainest.
NAMES = ("int4 head_dim 64, group of 3", "int3 head_dim 80", "int4 group of 12, head_dim 96")


@pytest.fixture(scope="module", params=NAMES, ids=lambda name: name.replace(" ", "-"))
def kernel(request, tmp_path_factory):
    layout, group = GEOMETRIES[request.param]
    heads = group * layout.num_kv_heads
    target = cuda_target("sm_90")
    tuning = decode_tuning(layout, heads, target.archs)
    func = paged_attention_decode(layout, heads, "float16", tuning).with_attr("global_symbol", "attention")
    built = tvm.compile(
        tvm.IRModule({"attention": func}), target=target.target, tir_pipeline=target.tir_pipeline
    )
    source = built.mod.imports[0].inspect_source("cuda")
    shape = _Decode(layout, heads, "float16", tuning)
    directory = tmp_path_factory.mktemp("emulated")
    program = build(source, directory, shape.shared_bytes, tuning.warps * 32)
    return program, layout, heads, shape.parts


@pytest.mark.parametrize("lengths", [[1], [150, 64, 65, 3], [1500], [5300]], ids=str)
def test_equals_numpy_within_its_arrays(kernel, lengths):
    program, layout, heads, parts = kernel
    if lengths[0] > 5000 and layout.page_size > 32:
        pytest.skip("more than 32 parts are tried once")
    columns = layout.num_kv_heads * parts
    device = DecodeDevice.of(layout, heads, 264, warps=4)
    case = AttentionCase(layout, heads, lengths, device, seed=len(lengths))
    arguments = {
        "q_ptr": case.q,
        "pool_ptr": case.pool,
        "kv_open_ptr": case.rows,
        "table_ptr": case.table,
        "counts_ptr": case.counts,
        "tasks_ptr": case.tasks,
        "scratch_ptr": case.scratch[: max(1, len(case.tasks))],
        "out_ptr": np.full(case.q.shape, np.nan, np.float16),
        "layer": 0,
        "num_tasks": len(case.tasks),
    }
    blocks = [(x, y) for x in range(columns) for y in range(len(case.tasks))]
    order = np.random.default_rng(0).permutation(len(blocks))
    after = run(program, arguments, [blocks[i] for i in order])
    assert case.error(after["out_ptr"], samples=8) <= 2e-3
    assert not after["scratch_ptr"][:, :, layout.head_dim + 2].any(), "a counter was not reset"
    assert lengths[0] < 1000 or len(case.tasks) > (32 if lengths[0] > 5000 else 1)
