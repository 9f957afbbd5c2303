"""Decode attention for CUDA, without a GPU: how steps are cut into tasks, and kernels that compile."""

from __future__ import annotations

import numpy as np
import pytest

from cuda_attention import GEOMETRIES, layout
from kvq.bench.attention_case import AttentionCase
from kvq.errors import CompileError, ConfigError
from kvq.runtime.decode_plan import DecodeDevice, plan_decode

PAGE = 64


def device(kv_heads=8) -> DecodeDevice:
    """An H200 that runs the int4 kernel of Llama-3-8B."""
    return DecodeDevice.of(layout(4, 4, kv_heads=kv_heads), 4 * kv_heads, 264, 4)


def requests(lengths):
    starts = np.concatenate([[0], np.cumsum([(n - 1) // PAGE for n in lengths])])
    return tuple(
        (int(start), 1000 + i, n - 1) for i, (start, n) in enumerate(zip(starts, lengths, strict=False))
    )


RAGGED = [int(n) for n in np.random.default_rng(0).integers(1, 9000, 40)]


@pytest.mark.parametrize(
    "lengths", [[1], [64], [65], [80, 65], [131072], [8192] * 8, [2148] * 20, RAGGED, [50000, 3], [70] * 256]
)
@pytest.mark.parametrize("slots", [0, 40, 1024])
def test_every_row_is_covered_once(lengths, slots):
    rows = requests(lengths)
    tasks = plan_decode(rows, PAGE, device(), slots).tolist()
    used: list[int] = []
    for row, (start, row_page, position) in enumerate(rows):
        own = sorted((task for task in tasks if task[0] == row), key=lambda task: task[7])
        assert [task[7] for task in own] == list(range(own[0][6])) and len(
            {tuple(task[5:7]) for task in own}
        ) == 1
        covered = [page for task in own for page in range(task[1], task[1] + task[2])]
        assert covered == list(range(start, start + position // PAGE))
        assert [task[4] for task in own] == [0] * (len(own) - 1) + [position % PAGE + 1]
        assert all(task[3] == row_page and (task[2] or task[4]) for task in own)
        if len(own) > 1:
            used += range(own[0][5], own[0][5] + len(own))
    assert len(used) == len(set(used)) and (not used or max(used) < slots)


def test_parts_of_a_long_sequence_fill_the_device_evenly():
    tasks = plan_decode(requests([131072]), PAGE, device(), 1024)
    assert 28 <= len(tasks) <= 33  # of 33 that run at once
    sizes = [task[2] for task in tasks]
    assert max(sizes) - min(sizes) <= 4


def test_rows_stay_whole_where_cutting_gains_nothing():
    assert len(plan_decode(requests([2148] * 20), PAGE, device(), 1024)) == 20
    assert len(plan_decode(requests([8192] * 64), PAGE, device(), 1024)) == 64


def test_a_long_row_among_short_ones_is_cut_and_goes_first():
    tasks = plan_decode(requests([300] * 40 + [100000]), PAGE, device(), 1024)
    assert sum(task[0] == 40 for task in tasks) > 10
    assert tasks[0][0] == 40
    assert [task[0] for task in tasks].index(0) > 10


def test_the_case_answers_as_the_oracle_of_one_row():
    """Uniform keys: attention is the mean of the values, whatever the plan, pages and open rows are."""
    case = AttentionCase(layout(4, 4), 8, [200, 65], device(2))
    case.q[:] = 0
    answer = case.answer(0, 1)
    assert answer.shape == (4, 128) and np.allclose(answer, answer[0])
    good = np.repeat(
        np.stack([np.stack([case.answer(r, h)[0] for h in range(2)]) for r in range(2)]), 4, axis=1
    )
    assert case.error(good.astype(np.float32), 4) < 1e-6
    good[1, 3] *= 1.1
    assert case.error(good.astype(np.float32), 4) > 0.01
    good[0, 0, 0] = np.nan
    assert np.isnan(case.error(good.astype(np.float32), 4))


@pytest.mark.parametrize("name", ["int4", "int3 head_dim 80", "k=int4:v=none"])
def test_compiles_for_every_generation(name, tmp_path):
    from kvq.bench.attention import compile_kernel
    from kvq.bench.attention_kernels import kernel_path
    from kvq.compiler.fatbin import find_nvcc

    try:
        find_nvcc()
    except CompileError as error:
        pytest.skip(str(error))
    shape, group = GEOMETRIES[name]
    heads = group * shape.num_kv_heads
    compile_kernel(tmp_path, shape, heads, "sm_80,sm_90")
    code = kernel_path(tmp_path, "decode", shape, heads).with_suffix(".so").read_bytes()
    assert b"\x50\xed\x55\xba" in code, "no fatbin in the library"


def test_tuning_follows_the_architectures():
    from kvq.schedules.cuda.paged_attention import decode_tuning

    hopper, mixed, ada = (
        decode_tuning(layout(4, 4), 8, archs) for archs in (["sm_90a"], ["sm_80", "sm_90"], ["sm_89"])
    )
    assert hopper.overlap and not mixed.overlap and not ada.overlap
    assert hopper.blocks_per_sm * hopper.stages > ada.blocks_per_sm * ada.stages
    assert decode_tuning(layout(3, 3), 8, ["sm_90"]).blocks_per_sm > hopper.blocks_per_sm


def test_shapes_are_read():
    from kvq.bench.attention import parse_shapes

    shapes = parse_shapes("1x8192, 64x2048h,3x500r")
    assert [str(shape) for shape in shapes] == ["1x8192", "64x2048h", "3x500r"]
    assert shapes[1].lengths(64) == [2016] * 64 and (2016 - 1) % 64 == 31
    assert len(set(shapes[2].lengths(64))) == 3 and max(shapes[2].lengths(64)) <= 500
    with pytest.raises(ConfigError, match="3y4"):
        parse_shapes("3y4")
