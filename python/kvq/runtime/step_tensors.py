"""The arrays of a step as tensors on the library's device.

On the CPU the plan's arrays are the tensors, wrapped without a copy. To a GPU everything that a step says
goes in one copy: the real parts of all arrays lie one after another in one buffer, and tensors are views of
it. Lists then have the length that counts, since a kernel on a GPU starts one block for each entry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tvm
import tvm_ffi

from kvq.runtime.cache_shape import logit_room
from kvq.runtime.cuda_driver import CudaDriver
from kvq.runtime.decode_plan import DecodeDevice, DecodeRow, following, plan_decode
from kvq.runtime.device import Device
from kvq.runtime.dlpack_view import Int32View
from kvq.runtime.metadata import Metadata
from kvq.runtime.sampler import DRAW_FIELDS
from kvq.runtime.step_plan import StepPlan, aligned_zeros

#: Row counts whose tensor views are kept; the counts of prefill's last chunks are many and cheap.
MAX_KEPT_VIEWS = 256
#: int32 that a view on a GPU starts at a multiple of.
_ALIGNMENT = 64


class StepTensors(NamedTuple):
    """What a library takes of a step.

    Attributes
    ----------
    ids, wanted
        Token ids ``int32[1, n]`` or ``[n, 1]``, and the rows whose logits are wanted (prefill only).
    draws
        How the tokens of these rows are drawn, ``int32[rows, DRAW_FIELDS]``; None on the CPU.
    faults, positions, slots
        ``kv_faults``, ``positions`` and ``append_slots`` of ``docs/design.md``.
    lists : tuple
        ``page_table`` and what follows it there.
    key : tuple of int
        Steps with equal keys have the same tensors: addresses and shapes. Empty where that is not said.
    """

    ids: Any
    wanted: Any
    draws: Any
    faults: Any
    positions: Any
    slots: Any
    lists: tuple[Any, ...]
    key: tuple[int, ...] = ()


class StepMaker(Protocol):
    """Makes the tensors of one step after another.

    Attributes
    ----------
    cuts_decode : bool
        Whether it cuts the attention of decode steps itself, from the plan's spans.
    """

    cuts_decode: bool

    def prefill(
        self, ids: Sequence[int], logit_rows: Sequence[int], draws: np.ndarray | None = None
    ) -> StepTensors:
        """Tensors of the planned step, for the library's ``prefill``."""
        ...

    def decode(self, ids: Sequence[int], draws: np.ndarray | None = None) -> StepTensors:
        """Tensors of the planned step, for the library's ``decode``."""
        ...

    def faults(self) -> np.ndarray:
        """NaNs replaced and values saturated by the step that ran, int ``[2]``."""
        ...

    def fetch_faults(self) -> None:
        """Start to fetch what :meth:`faults` returns, where that takes time."""
        ...

    def expect_next(self) -> None:
        """While a decode step runs: prepare for the one that most likely follows, where that takes time."""
        ...


def step_maker(plan: StepPlan, device: Device, metadata: Metadata, driver: CudaDriver | None) -> StepMaker:
    """The maker for a device and a library; ``driver`` is that of a GPU."""
    return HostSteps(plan) if device.kind == "cpu" else DeviceSteps(plan, device, metadata, driver)


class HostSteps:
    """Steps of a library for the CPU."""

    cuts_decode = False

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self._ids = aligned_zeros((plan.max_rows,), np.int32)
        self._logit_rows = aligned_zeros((plan.max_rows,), np.int32)
        self._views: dict[int, tuple[Any, Any, Any, Any]] = {}
        wrap = tvm_ffi.from_dlpack
        self._faults = wrap(plan.kv_faults)
        self._lists = tuple(
            wrap(array)
            for array in (
                plan.page_table,
                plan.plan_counts,
                plan.seal_tasks,
                plan.carry_tasks,
                plan.attention_tasks,
                plan.merge_tasks,
            )
        )

    def prefill(
        self, ids: Sequence[int], logit_rows: Sequence[int], draws: np.ndarray | None = None
    ) -> StepTensors:
        """Tensors of the planned step, for the library's ``prefill``."""
        row_ids, _, positions, slots = self._rows(ids)
        self._logit_rows[: len(logit_rows)] = logit_rows
        wanted = tvm_ffi.from_dlpack(self._logit_rows[: len(logit_rows)])
        return StepTensors(row_ids, wanted, None, self._faults, positions, slots, self._lists)

    def decode(self, ids: Sequence[int], draws: np.ndarray | None = None) -> StepTensors:
        """Tensors of the planned step, for the library's ``decode``."""
        _, column_ids, positions, slots = self._rows(ids)
        return StepTensors(column_ids, None, None, self._faults, positions, slots, self._lists)

    def faults(self) -> np.ndarray:
        """NaNs replaced and values saturated by the step that ran."""
        return self.plan.kv_faults[: self.plan.num_rows].sum(axis=0)

    def fetch_faults(self) -> None:
        """Nothing: they are here."""

    def expect_next(self) -> None:
        """Nothing: the plan is made in one go."""

    def _rows(self, ids: Sequence[int]) -> tuple[Any, Any, Any, Any]:
        """Tensors over the step's rows: ids ``[1, n]`` and ``[n, 1]``, positions, slots."""
        count = self.plan.num_rows
        self._ids[:count] = ids
        views = self._views.get(count)
        if views is None:
            if len(self._views) >= MAX_KEPT_VIEWS:
                self._views.clear()
            kept, wrap = self._ids[:count], tvm_ffi.from_dlpack
            views = (
                wrap(kept.reshape(1, count)),
                wrap(kept.reshape(count, 1)),
                wrap(self.plan.positions[:count]),
                wrap(self.plan.append_slots[:count]),
            )
            self._views[count] = views
        return views


class DeviceSteps:
    """Steps of a library for a GPU.

    Parameters
    ----------
    driver : CudaDriver, optional
        Copies on its stream, from memory that is pinned; without one, TVM copies.
    """

    def __init__(
        self, plan: StepPlan, device: Device, metadata: Metadata, driver: CudaDriver | None = None
    ) -> None:
        self.plan, self.device, self.metadata, self._driver = plan, device, metadata, driver
        self._decode: DecodeDevice | None = None
        if spec := metadata.decode:
            blocks = device.threads * spec.blocks_per_sm
            heads = metadata.model.num_attention_heads
            self._decode = DecodeDevice.of(metadata.layout, heads, blocks, spec.warps)
        self.cuts_decode = self._decode is not None
        self._last: tuple[list[DecodeRow], int] | None = None
        arrays = (plan.page_table, plan.seal_tasks, plan.carry_tasks, plan.attention_tasks, plan.merge_tasks)
        room = sum(array.size for array in arrays) + 5 * plan.max_rows + 16 * _ALIGNMENT
        room += (1 + DRAW_FIELDS) * logit_room(plan.max_rows)
        if metadata.decode:
            room += metadata.decode.task_fields * (plan.max_rows + metadata.scratch_slots + _ALIGNMENT)
        self._staging = driver.pinned_zeros(room) if driver else aligned_zeros((room,), np.int32)
        self._fetched = driver.pinned_zeros(2 * plan.max_rows) if driver else None
        self._buffer = tvm.runtime.empty((room,), "int32", device.handle)
        self._address = self._buffer.data_ptr()
        self._views: dict[tuple[int, tuple[int, ...]], Int32View] = {}
        self._faults: Any = None
        self._on_its_way = False

    def prefill(
        self, ids: Sequence[int], logit_rows: Sequence[int], draws: np.ndarray | None = None
    ) -> StepTensors:
        """Tensors of the planned step, for the library's ``prefill``."""
        # whole rooms, so that sizes repeat: the last row is wanted again
        room = logit_room(len(logit_rows))
        rows = np.asarray([*logit_rows, *[logit_rows[-1]] * (room - len(logit_rows))], np.int32)
        first = [(np.asarray(ids, np.int32)[None], 1), (rows, room), (_fields(draws), room)]
        row_ids, wanted, drawn, faults, *rest = self._upload(self._tasks(), first)
        return StepTensors(row_ids, wanted, drawn, faults, rest[0], rest[1], tuple(rest[2:]))

    def decode(self, ids: Sequence[int], draws: np.ndarray | None = None) -> StepTensors:
        """Tensors of the planned step, for the library's ``decode``."""
        # without graphs every step has the rows that it has
        rows = self.plan.num_rows if self._driver is None else self._decode_room()
        fill = rows - self.plan.num_rows
        tasks = self._filled_tasks(fill) if self._decode is None else self._decode_tasks(self._decode, fill)
        key: tuple[int, ...] = ()
        if self._driver is not None:
            # room for steps to come: kernels look at the counts, so what is behind them is not read
            seals, carries, _, merges = self.plan.plan_counts.tolist()
            key = (rows, _aligned(len(tasks)), *(self._room(n, rows) for n in (seals, carries, merges)))
        first = [(np.array(ids, np.int32)[:, None], rows), (_fields(draws), rows)]
        column_ids, drawn, faults, *rest = self._upload(tasks, first, key[1:], fill)
        return StepTensors(column_ids, None, drawn, faults, rest[0], rest[1], tuple(rest[2:]), key)

    def _decode_room(self) -> int:
        """Rows of a decode step, so that few graphs serve all numbers of sequences.

        The rows that fill it up are of no sequence: they are written to the workspace, which a decode step
        does not use otherwise, and see the first token of the first sequence's open page.
        """
        rows = decode_room(self.plan.num_rows)
        return rows if rows <= min(self.plan.max_rows, self.metadata.max_batch_size) else self.plan.num_rows

    @staticmethod
    def _room(count: int, rows: int) -> int:
        """Entries of a list of which a decode step has ``count``: one, or as many as there are rows."""
        return 1 if count <= 1 else max(count, rows)

    def faults(self) -> np.ndarray:
        """NaNs replaced and values saturated by the step that ran."""
        if self._driver is None or self._fetched is None:
            return self._faults.numpy().sum(axis=0)
        if not self._on_its_way:
            self.fetch_faults()
            self._driver.synchronize()
        self._on_its_way = False
        return self._fetched[: 2 * self.plan.num_rows].reshape(-1, 2).sum(axis=0)

    def fetch_faults(self) -> None:
        """Put the copy of the faults on the stream, for :meth:`faults` after its end."""
        if self._driver is not None and self._fetched is not None:
            self._driver.copy_to_host(self._fetched[: 2 * self.plan.num_rows], self._faults.data_ptr())
            self._on_its_way = True

    def _tasks(self) -> np.ndarray:
        """The plan's attention tasks."""
        return self.plan.attention_tasks[: self.plan.plan_counts[2]]

    def _filled_tasks(self, fill: int) -> np.ndarray:
        """The plan's attention tasks, and those of ``fill`` rows more."""
        rows, tasks = self.plan.num_rows, self._tasks()
        more = [(row, row + 1, 0, tasks[0, 3], 0, 1, -1) for row in range(rows, rows + fill)]
        return np.concatenate([tasks, np.array(more, np.int32).reshape(-1, 7)])

    def _decode_tasks(self, device: DecodeDevice, fill: int) -> np.ndarray:
        """The attention tasks of one row a sequence and of ``fill`` more, int32 ``[tasks, fields]``."""
        plan = self.plan
        positions = plan.positions[: plan.num_rows].tolist()
        rows = [(span[2], span[3], position) for span, position in zip(plan.spans, positions, strict=True)]
        return self._cut(device, rows, fill)

    def expect_next(self) -> None:
        """Cut the attention of the step that follows if the same sequences run in it."""
        if self._decode is not None and self._last is not None:
            rows, fill = self._last
            self._cut(self._decode, following(rows, self.plan.cache.page_size), fill)
            self._last = None

    def _cut(self, device: DecodeDevice, rows: list[DecodeRow], fill: int) -> np.ndarray:
        self._last = rows, fill
        filled = (*rows, *[(0, rows[0][1], 0)] * fill)
        return plan_decode(filled, self.plan.cache.page_size, device, self.metadata.scratch_slots)

    def _upload(
        self,
        tasks: np.ndarray,
        first: list[tuple[np.ndarray, int]],
        room: tuple[int, ...] = (),
        fill: int = 0,
    ) -> list[Any]:
        """Copy arrays, the plan's, and the attention's tasks in one piece; their tensors.

        Parameters
        ----------
        first : list of (array, int)
            Arrays that go before the plan's, and the entries of each tensor; what is behind an array is zero.
        room : tuple of int
            Entries that tasks, seals, carries and merges get, instead of those that count; the page table
            then has all it may ever have.
        fill : int
            Rows that follow the plan's (:meth:`_decode_room`).
        """
        plan, rows = self.plan, self.plan.num_rows
        seals, carries, _, merges = (max(1, count) for count in plan.plan_counts.tolist())
        length = len(tasks)
        if room:
            length, seals, carries, merges = room
        counts = plan.plan_counts.copy()
        counts[2] = len(tasks)
        arrays = [
            *first,
            (plan.kv_faults[:rows], rows + fill),
            (plan.positions[:rows], rows + fill),
            (plan.append_slots[:rows], rows + fill),
            (counts, 4),
            (plan.seal_tasks[:seals], seals),
            (plan.carry_tasks[:carries], carries),
            (tasks, length),
            (plan.merge_tasks[:merges], merges),
            # last and rounded up, so that a step of decode like the one before has the same views
            (plan.page_table[: _aligned(plan.table_entries)], 0),
        ]
        staging, used = self._staging, 0
        places: list[tuple[int, tuple[int, ...]]] = []
        for array, entries in arrays:
            size, shape = array.size, array.shape
            end = used + size
            staging[used:end] = array.ravel()
            if entries > shape[0]:
                shape = (entries, *shape[1:])
                staging[end : (end := used + math.prod(shape))] = 0
            places.append((used, shape))
            used += _aligned(end - used)
        if fill:
            # rows of no sequence are written to the workspace
            start = places[len(first) + 2][0] + rows
            staging[start : start + fill] = plan.cache.open_pages.num_open * plan.cache.page_size
        if self._driver is None:
            self._buffer._create_view((used,)).copyfrom(staging[:used])
        else:
            self._driver.copy_to_device(self._address, staging[:used])
        if room:
            places[-1] = places[-1][0], (_aligned(plan.page_table.size),)
        if len(self._views) > MAX_KEPT_VIEWS * len(arrays):
            self._views.clear()
        tensors = [self._view(place) for place in places]
        self._faults = tensors[len(first)]
        tensors.insert(len(first) + 3, tensors.pop())  # the page table comes first of the lists
        return tensors

    def _view(self, place: tuple[int, tuple[int, ...]]) -> Any:
        view = self._views.get(place)
        if view is None:
            view = self._views[place] = Int32View(self._buffer, *place)
        return view.tensor


def decode_room(count: int) -> int:
    """Rows that a decode step of ``count`` sequences is given."""
    step = next(step for most, step in ((2, 1), (16, 4), (64, 8), (count, 16)) if count <= most)
    return -(-count // step) * step


def _fields(draws: np.ndarray | None) -> np.ndarray:
    """The draws that are said; the likeliest token is drawn of rows without."""
    return np.zeros((0, DRAW_FIELDS), np.int32) if draws is None else draws


def _aligned(count: int) -> int:
    return max(1, -(-count // _ALIGNMENT)) * _ALIGNMENT
