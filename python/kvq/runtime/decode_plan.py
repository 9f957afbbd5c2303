"""How a decode step's attention is cut into tasks on a GPU.

On a GPU a *part* of a row's keys is what one block of warps reads: whole sealed pages, and with the last part
the rows of the own page. A device runs a known number of blocks at once and starts the next one when one
ends, so rows are cut such that the last block is done soon: equal shares, the longest first, and no more
parts than that takes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from kvq.layout import FRAGMENT_TILE, KVLayout

#: What a part costs beyond its pages, and adding parts up: the time in which the device reads so many bytes.
PART_BYTES, MERGE_BYTES = 9_200_000, 18_400_000
#: How much faster than with all its neighbours a block runs alone, for caches below so many bits a value:
#: narrow codes keep a block's warps busy, wide ones its multiprocessor's share of the memory.
RATES = ((4.0, 1.2), (9.0, 2.0), (99.0, 1.0))
#: A plan this much longer than the ideal is taken as it is.
GOOD_ENOUGH = 1.06
#: Parts that are added up at once: a few more would cost another round.
BATCH = 32
#: Task fields: row, start in the page table, sealed pages, row page, rows of the own page that the task sees
#: (0 where the own page belongs to another part), first scratch slot of the row, its parts, and which of them
#: the task is.
DecodeTask = tuple[int, int, int, int, int, int, int, int]
#: A row of a step: where its sealed pages start in the page table, its open page, its position.
DecodeRow = tuple[int, int, int]


@dataclass(frozen=True)
class DecodeDevice:
    """What the plan needs to know of a device and a kernel; work is counted in sealed pages.

    Attributes
    ----------
    columns : int
        Tasks that run at once: a task is a block for each KV head, twice as many where one serves more than 8
        query heads.
    warps : int
        Warps of a block.
    tile_work, part_work, merge_work : float
        Work of a tile of 16 unsealed rows; of a part beyond its pages; of adding parts up.
    rate : float
        How much faster a block is alone.
    """

    columns: int
    warps: int
    tile_work: float
    part_work: float
    merge_work: float
    rate: float

    @staticmethod
    def of(layout: KVLayout, num_heads: int, blocks: int, warps: int) -> DecodeDevice:
        """For a cache, a model, and a device that runs ``blocks`` blocks of a kernel at once."""
        heads = layout.num_kv_heads * -(-(num_heads // layout.num_kv_heads) // 8)
        size = layout.unit_words * 4
        return DecodeDevice(
            max(1, blocks // heads),
            warps,
            FRAGMENT_TILE * layout.head_dim * 4 / size,
            PART_BYTES / blocks / size,
            MERGE_BYTES / blocks / size,
            next(rate for bits, rate in RATES if layout.bits_per_value < bits),
        )


@lru_cache(maxsize=4)
def plan_decode(
    rows: tuple[DecodeRow, ...], page_size: int, device: DecodeDevice, scratch_slots: int
) -> np.ndarray:
    """Cut the rows of a decode step into parts, the longest first: tasks, int32 ``[tasks, 8]``, read only.

    Parameters
    ----------
    rows : tuple of DecodeRow
        Row ``i`` of the step is entry ``i``.
    page_size : int
        Tokens of a page.
    device : DecodeDevice
        The device.
    scratch_slots : int
        Partial results there is room for; rows stay whole when it is used up.
    """
    work = _work(rows, page_size)
    tasks = _tasks(work, device, scratch_slots).copy()
    starts, row_pages, positions = np.array(rows, np.int32).T
    grown = positions // page_size - np.array([pages for pages, _ in work], np.int32)
    row, last = tasks[:, 0], tasks[:, 4]
    tasks[:, 1] += starts[row]
    tasks[:, 2] += last * grown[row]
    tasks[:, 3] = row_pages[row]
    tasks[:, 4] = last * (positions % page_size + 1)[row]
    tasks.flags.writeable = False
    return tasks


def following(rows: Sequence[DecodeRow], page_size: int) -> list[DecodeRow]:
    """The rows of the decode step after this one, if the same sequences run in it."""
    after, shift = [], 0
    for start, row_page, position in rows:
        after.append((start + shift, row_page, position + 1))
        shift += not (position + 2) % page_size  # a page that is completed then is in the table then
    return after


def _work(rows: Sequence[DecodeRow], page_size: int) -> tuple[tuple[int, int], ...]:
    """Sealed pages, and tiles of the own page, of each row.

    All rows are taken back to where the first one began its tile: so their work stays for as many steps, in
    which a row completes one page at most.
    """
    back = rows[0][2] % FRAGMENT_TILE
    places = [divmod(max(0, position - back), page_size) for _, _, position in rows]
    return tuple((page, at // FRAGMENT_TILE + 1) for page, at in places)


@lru_cache(maxsize=8)
def _tasks(work: tuple[tuple[int, int], ...], device: DecodeDevice, scratch_slots: int) -> np.ndarray:
    """The tasks of rows with start and row page 0, and one row of the own page."""
    sizes = [pages + tiles * device.tile_work for pages, tiles in work]
    bounds = _best_bounds([pages for pages, _ in work], sizes, device)
    tasks: list[tuple[float, DecodeTask]] = []
    used = 0
    for row, ((pages, _), size) in enumerate(zip(work, sizes, strict=True)):
        cuts, slot = bounds[row], 0
        parts = len(cuts) - 1
        if 1 < parts <= scratch_slots - used:
            slot, used = used, used + parts
        else:
            cuts, parts = [0, pages], 1
        for part, (cost, first, end) in enumerate(_costs(cuts, size)):
            tasks.append((cost, (row, first, end - first, 0, int(part == parts - 1), slot, parts, part)))
    tasks.sort(key=lambda item: -item[0])
    return np.array([task for _, task in tasks], np.int32)


def _best_bounds(pages: Sequence[int], sizes: Sequence[float], device: DecodeDevice) -> list[list[int]]:
    """Bounds of the parts of each row: of a few ways to cut, the one that should be done first."""
    ideal = sum(sizes) / device.columns
    best: list[list[int]] = []
    shortest = float("inf")
    for share in (None, 1, 2, 3):
        target = float("inf") if share is None else max(device.warps, ideal / share)
        bounds = [_bounds(n, size, target, device.warps) for n, size in zip(pages, sizes, strict=True)]
        time = _makespan(bounds, sizes, device)
        if time < shortest:
            best, shortest = bounds, time
        if max(sizes) <= device.warps or shortest < (ideal + device.part_work) * GOOD_ENOUGH:
            break
    return best


def _bounds(pages: int, size: float, target: float, warps: int) -> list[int]:
    """Where the parts of a row of ``pages`` sealed pages start and end; ``size`` counts the own page, too."""
    parts = max(1, round(size / target))
    if parts > BATCH and parts % BATCH < BATCH // 4:
        parts -= parts % BATCH
    cuts = (int(part * size / parts) // warps * warps for part in range(1, parts))
    return [0, *sorted({cut for cut in cuts if 0 < cut < pages}), pages]


def _costs(bounds: Sequence[int], size: float) -> list[tuple[float, int, int]]:
    """Work, first page and end page of each part of a row; the own page goes with the last."""
    last = len(bounds) - 2
    pairs = enumerate(pairwise(bounds))
    return [
        (size - first if part == last else float(end - first), first, end) for part, (first, end) in pairs
    ]


def _makespan(bounds: Sequence[Sequence[int]], sizes: Sequence[float], device: DecodeDevice) -> float:
    """When the last part is done, if each column takes the longest that is left.

    When columns run dry, the blocks that are left have more of the memory, up to ``rate`` times as much.
    """
    costs = []
    for cuts, size in zip(bounds, sizes, strict=True):
        overhead = device.part_work + (device.merge_work if len(cuts) > 2 else 0)
        costs += [cost + overhead for cost, _, _ in _costs(cuts, size)]
    costs.sort(reverse=True)
    columns = device.columns
    ends = (costs[:columns] + [0.0] * columns)[:columns]
    heapq.heapify(ends)
    for cost in costs[columns:]:
        heapq.heapreplace(ends, ends[0] + cost)
    time = before = 0.0
    for done, end in enumerate(sorted(ends)):
        time += (end - before) / min(device.rate, columns / (columns - done))
        before = end
    return time
