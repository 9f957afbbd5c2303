"""A step's arrays on a device: on the CPU's tensors, so that no GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tvm

from host_memory import HostMemory
from kvq.layout import KVLayout
from kvq.runtime.decode_plan import DecodeDevice, plan_decode
from kvq.runtime.device import Device
from kvq.runtime.dlpack_view import Int32View
from kvq.runtime.kv_cache import PagedKVCache
from kvq.runtime.metadata import DecodeSpec
from kvq.runtime.sampler import DRAW_FIELDS
from kvq.runtime.step_plan import StepPlan, build_step
from kvq.runtime.step_tensors import DeviceSteps, HostSteps, decode_room

LAYOUT = KVLayout(2, 2, 64, 4, 4, 64, order="fragments")


def metadata(decode: DecodeSpec | None = None, slots: int = 1) -> SimpleNamespace:
    model = SimpleNamespace(num_attention_heads=4)
    return SimpleNamespace(decode=decode, scratch_slots=slots, layout=LAYOUT, model=model, max_batch_size=4)


@pytest.fixture
def plan() -> StepPlan:
    cache = PagedKVCache(LAYOUT, 60, 4, 8, lambda src, dst: None)
    for sequence in "abc":
        cache.add_sequence(sequence)
    return StepPlan(cache, 400, 240, 4, 0, 16)


def test_a_view_is_the_memory_it_points_to():
    buffer = tvm.runtime.tensor(np.arange(200, dtype=np.int32))
    owner = Int32View(buffer, 64, (3, 7))
    view = owner.tensor
    assert view.data_ptr() == buffer.data_ptr() + 256
    np.testing.assert_array_equal(view.numpy(), np.arange(64, 85).reshape(3, 7))
    buffer.copyfrom(np.zeros(200, np.int32))
    assert not view.numpy().any()


def test_a_device_gets_what_the_host_has(plan):
    device = Device.open("cpu")
    host, copied = HostSteps(plan), DeviceSteps(plan, device, metadata())
    for requests in ([("a", 150), ("b", 3)], [("c", 64)], [("a", 1), ("b", 1), ("c", 1)], [("b", 130)]):
        rows = sum(count for _, count in requests)
        ids = list(range(7, 7 + rows))
        build_step(plan, requests, 1)
        plan.kv_faults[0] = 3, 4
        calls = [lambda maker, ids=ids, rows=rows: maker.prefill(ids, [0, rows - 1])]
        if rows == len(requests):
            calls.append(lambda maker, ids=ids: maker.decode(ids))
        for call in calls:
            expected, found = call(host), call(copied)
            for name in ("ids", "positions", "slots"):
                one, other = getattr(expected, name), getattr(found, name)
                assert one.shape == other.shape
                np.testing.assert_array_equal(one.numpy(), other.numpy())
            assert (expected.wanted is None) == (found.wanted is None)
            counts = expected.lists[1].numpy()
            np.testing.assert_array_equal(found.lists[1].numpy(), counts)
            used = [plan.table_entries, 4, *counts]
            for one, other, length in zip(expected.lists, found.lists, used, strict=True):
                np.testing.assert_array_equal(one.numpy()[:length], other.numpy()[:length])
            # a kernel starts a block for each entry: no more than there are, and never none
            assert [len(other.numpy()) for other in found.lists[2:]] == [max(1, n) for n in counts]
        assert copied.faults().tolist() == host.faults().tolist() == [3, 4]
        plan.commit()


def test_logits_of_a_device_have_room_for_a_power_of_two(plan):
    steps = DeviceSteps(plan, Device.open("cpu"), metadata())
    build_step(plan, [("a", 10), ("b", 3), ("c", 2)], 1)
    draws = np.arange(3 * DRAW_FIELDS, dtype=np.int32).reshape(3, DRAW_FIELDS)
    found = steps.prefill(list(range(15)), [9, 12, 14], draws)
    assert found.wanted.numpy().tolist() == [9, 12, 14, 14]
    np.testing.assert_array_equal(found.draws.numpy()[:3], draws)
    assert found.draws.shape == (4, DRAW_FIELDS) and not found.draws.numpy()[3].any()
    assert not steps.prefill(list(range(15)), [14]).draws.numpy().any(), "what is not said is the likeliest"
    plan.abort()


def test_decode_is_cut_by_the_plan_for_gpus(plan):
    device, spec = Device.open("cpu"), DecodeSpec(8, 2, 4)
    steps = DeviceSteps(plan, device, metadata(spec, 64))
    build_step(plan, [("a", 300), ("b", 90), ("c", 5)], 1)
    plan.commit()
    build_step(plan, [("a", 1), ("b", 1), ("c", 1)], 1)
    found = steps.decode([1, 2, 3])
    cutter = DecodeDevice.of(LAYOUT, 4, device.threads * 2, 4)
    open_pages = [plan.cache.sequence(name).open_page for name in "abc"]
    rows = tuple(zip((0, 4, 5), open_pages, (300, 90, 5), strict=True))
    expected = plan_decode(rows, 64, cutter, 64)
    np.testing.assert_array_equal(found.lists[4].numpy(), np.array(expected, np.int32))
    assert found.lists[1].numpy().tolist() == [0, 0, len(expected), 0]
    plan.abort()


def test_decode_steps_have_the_same_tensors_until_they_need_more_room(plan):
    device, spec = Device.open("cpu"), DecodeSpec(8, 2, 4)
    steps = DeviceSteps(plan, device, metadata(spec, 64), HostMemory())
    plain = DeviceSteps(plan, device, metadata(spec, 64))
    for requests in ([("a", 300)], [("a", 300)], [("b", 126), ("c", 5)]):
        build_step(plan, requests, 1)
        plan.commit()
    seen = {}
    for _ in range(4):  # b completes a page in the second
        build_step(plan, [("a", 1), ("b", 1), ("c", 1)], 1)
        plan.kv_faults[1] = 2, 0
        found, expected = steps.decode([7, 8, 9]), plain.decode([7, 8, 9])
        tensors = [found.ids, found.faults, found.positions, found.slots, *found.lists]
        places = [(tensor.data_ptr(), tuple(tensor.shape)) for tensor in tensors]
        assert seen.setdefault(found.key, places) == places
        others = [expected.ids, expected.faults, expected.positions, expected.slots, *expected.lists]
        for one, other in zip(tensors, others, strict=True):
            assert all(a >= b for a, b in zip(one.shape, other.shape, strict=True))
            length = 4 if one is found.lists[1] else len(other.numpy())
            same = one.numpy()[:length] == other.numpy()[:length]
            assert same.all() or (one is found.lists[1] and not same[2]), "but for the tasks of the row more"
        assert steps.faults().tolist() == [2, 0]
        plan.commit()
    assert len(seen) == 1 and found.lists[4].shape[0] % 64 == 0


def test_the_step_that_follows_is_cut_while_the_one_before_runs(plan):
    steps = DeviceSteps(plan, Device.open("cpu"), metadata(DecodeSpec(8, 2, 4), 64), HostMemory())
    for requests in ([("a", 300)], [("b", 125), ("c", 63)]):
        build_step(plan, requests, 1)
        plan.commit()
    plan_decode.cache_clear()
    for _ in range(70):  # each sequence completes a page at least
        build_step(plan, [("a", 1), ("b", 1), ("c", 1)], 1, cut_attention=False)
        steps.decode([7, 8, 9])
        steps.expect_next()
        plan.commit()
    assert plan_decode.cache_info().misses == 71, "but for the first one every plan was there"


@pytest.mark.parametrize("spec", [None, DecodeSpec(8, 2, 4)])
def test_decode_steps_are_filled_up_with_rows_of_no_sequence(plan, spec):
    steps = DeviceSteps(plan, Device.open("cpu"), metadata(spec, 64), HostMemory())
    for requests in ([("a", 300)], [("b", 90), ("c", 5)]):
        build_step(plan, requests, 1)
        plan.commit()
    build_step(plan, [("a", 1), ("b", 1), ("c", 1)], 1)
    plan.kv_faults[:] = 9
    found = steps.decode([7, 8, 9])
    assert found.ids.numpy()[:, 0].tolist() == [7, 8, 9, 0] and found.draws.shape == (4, DRAW_FIELDS)
    assert found.positions.numpy().tolist() == [300, 90, 5, 0]
    workspace = plan.cache.open_pages.num_open * LAYOUT.page_size
    slots = found.slots.numpy()
    assert slots[3] == workspace and (slots[:3] < workspace).all()
    assert found.faults.numpy().tolist() == [[9, 9]] * 3 + [[0, 0]]
    tasks = found.lists[4].numpy()[: found.lists[1].numpy()[2]]
    (more,) = (task.tolist() for task in tasks if task[0] == 3)
    page = plan.cache.sequence("a").open_page
    assert more == ([3, 4, 0, page, 0, 1, -1] if spec is None else [3, 0, 0, page, 1, 0, 1, 0])
    assert steps.faults().tolist() == [27, 27], "of the sequences alone"
    plan.abort()


def test_rooms_of_decode_steps() -> None:
    rooms = [decode_room(rows) for rows in range(1, 129)]
    assert all(room >= rows for rows, room in enumerate(rooms, 1)) and rooms == sorted(rooms)
    assert rooms[:6] == [1, 2, 4, 4, 8, 8] and len(set(rooms)) == 16
