"""Step plans: limits, the cutting of attention into tasks, and the arrays' form."""

from __future__ import annotations

import pytest

from kv_oracle import FakeDevice
from kvq.errors import CacheError
from kvq.layout import KVLayout
from kvq.runtime.kv_cache import PagedKVCache
from kvq.runtime.step_plan import ALIGNMENT, StepPlan, aligned_zeros, build_step

P = 64


def make_plan(heads: int = 3, slots: int = 64, **limits: int) -> StepPlan:
    cache = PagedKVCache(KVLayout(1, heads, 64, page_size=P), 256, 8, 40)
    cache.add_sequence(0)
    return StepPlan(cache, limits.get("max_rows", 40 * P), limits.get("max_table_pages", 256), 16, slots)


def advance(plan: StepPlan, length: int) -> None:
    while (left := length - plan.cache.length(0)) > 0:
        build_step(plan, [(0, min(left, 32 * P))], 1)
        plan.commit()


def attention(plan: StepPlan) -> list[list[int]]:
    return plan.attention_tasks[: plan.plan_counts[2]].tolist()


def test_arrays_are_aligned() -> None:
    plan = make_plan()
    for name in ("positions", "append_slots", "page_table", "plan_counts", "seal_tasks", "attention_tasks"):
        array = getattr(plan, name)
        assert array.ctypes.data % ALIGNMENT == 0 and array.flags.c_contiguous and array.dtype == "int32"
    assert aligned_zeros((3, 5), "float16").shape == (3, 5)


def test_too_many_rows_or_table_entries_change_nothing() -> None:
    plan = make_plan(max_rows=10)
    with pytest.raises(CacheError, match="11 rows, the library's limit is 10"):
        build_step(plan, [(0, 11)], 1)
    plan = make_plan(max_table_pages=2)
    with pytest.raises(CacheError, match="3 entries, room is for 2"):
        build_step(plan, [(0, 3 * P)], 1)
    plan.cache.check_integrity()
    assert plan.cache.length(0) == 0 and plan.cache.num_free_pages == 256


def test_decode_splits_a_long_row_and_merges_it() -> None:
    plan = make_plan()
    advance(plan, 16 * P * 3 + 5)
    build_step(plan, [(0, 1)], threads=2)
    assert sorted(task[4:] for task in attention(plan)) == [[0, 1, 0], [1, 2, 1], [2, 3, 2], [3, 4, 3]]
    assert plan.merge_tasks[: plan.plan_counts[3]].tolist() == [[0, 0, 4]]


@pytest.mark.parametrize(
    ("units", "slots", "sizes"), [(9, 64, [1] * 4), (4, 64, [2, 2]), (9, 3, [2, 2]), (9, 1, [4])]
)
def test_on_a_gpu_parts_fill_it_once_and_fit_the_scratch(units: int, slots: int, sizes: list[int]) -> None:
    plan = make_plan(heads=8, slots=slots)
    plan.on_gpu = True
    advance(plan, 16 * P * 3 + 5)
    build_step(plan, [(0, 1)], units)
    tasks = attention(plan)
    assert [end - start for *_, start, end, _ in tasks] == sizes
    assert [task[5] for task in tasks] == sorted((task[5] for task in tasks), reverse=True)
    if len(sizes) > 1:
        assert plan.merge_tasks[: plan.plan_counts[3]].tolist() == [[0, 0, len(sizes)]]
        assert sorted(task[6] for task in tasks) == list(range(len(sizes)))


@pytest.mark.parametrize(("threads", "heads", "slots"), [(1, 8, 64), (2, 3, 3), (2, 8, 0)])
def test_no_split_without_need_or_slots(threads: int, heads: int, slots: int) -> None:
    plan = make_plan(heads, slots)
    advance(plan, 16 * P * 3 + 5)
    build_step(plan, [(0, 1)], threads)
    assert attention(plan) == [[0, 1, 0, 0, 0, 4, -1]]
    assert plan.plan_counts[3] == 0


@pytest.mark.parametrize(("threads", "tile"), [(1, 16), (2, 16), (40, 8), (256, 4)])
def test_prefill_tiles_shrink_with_idle_threads(threads: int, tile: int) -> None:
    plan = make_plan(heads=2)
    build_step(plan, [(0, 3 * P)], threads)
    tasks = attention(plan)
    assert {end - first for first, end, *_ in tasks} == {tile}
    assert sorted(first for first, *_ in tasks) == list(range(0, 3 * P, tile))


def test_rows_that_share_a_page_are_not_split() -> None:
    plan = make_plan()
    advance(plan, 16 * P * 3 + 5)
    build_step(plan, [(0, 7)], threads=2)
    assert attention(plan) == [[0, 7, 0, 0, 0, 4, -1]]


def test_shares_of_a_prefill_cost_about_the_same() -> None:
    plan = make_plan(heads=8)
    build_step(plan, [(0, 32 * P)], threads=2)
    # row page 0 is page 0, workspace page w (row page 8 + w) is page w + 1
    costs = [(end - first) * max(1, row_page - 6) for first, end, _, row_page, *_ in attention(plan)]
    half = len(costs) // 2
    assert abs(sum(costs[:half]) - sum(costs[half:])) < 0.1 * sum(costs)


def test_a_gpu_takes_the_longest_tasks_first() -> None:
    plan = make_plan()
    plan.on_gpu = True
    plan.cache.add_sequence("a")
    build_step(plan, [("a", 40 * P)], 4)
    tasks = plan.attention_tasks[: plan.plan_counts[2]]
    splits = list(tasks[:, 5] - tasks[:, 4])
    assert splits == sorted(splits, reverse=True) and len(set(splits)) > 2
    assert sorted(row for first, end, *_ in tasks for row in range(first, end)) == list(range(40 * P))


@pytest.mark.parametrize("threads", [1, 2, 16, 64])
@pytest.mark.parametrize("count", [1, 2, 7, 16, 17, 64, 65, 200])
def test_every_row_is_computed_once_whatever_the_threads(threads: int, count: int) -> None:
    device = FakeDevice(40, 3, 20, page_size=64, split_pages=2)
    for sequence, length in ((0, 500), (1, 63), (2, 0)):
        device.cache.add_sequence(sequence)
        device.tokens[sequence] = []
        if length:
            device.append([(sequence, length)])
    device.append([(0, count), (1, 1), (2, count)], threads)
    device.append([(2, 1), (1, 1), (0, 1)], threads)
    device.cache.check_integrity()
