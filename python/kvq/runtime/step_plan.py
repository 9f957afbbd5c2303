"""What one step of the model does to the cache, as the arrays that a compiled library takes.

``docs/design.md`` defines the arrays. They are allocated once, aligned for the kernels, and filled
in place; a library wraps ``positions[:n]`` and the rest as tensors without a copy.

Attention work is cut into tasks. A task never changes a result (on a GPU: but for rounding), only who
computes it: rows are tiled, and where tasks are scarce a row's splits become tasks of their own, whose
partial results a merge task adds up. A CPU's kernels run tasks x KV heads on the threads in equal,
contiguous shares, so tasks of unequal cost are dealt out to those shares. A GPU takes tasks in order, the
longest first; of a split row a task has as many splits as leave no task waiting, since each begins and ends
with work of its own.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Any

import numpy as np

from kvq.errors import CacheError
from kvq.runtime.kv_cache import Append, PagedKVCache, SequenceId

#: The kernels' vector loads may assume this alignment, in bytes.
ALIGNMENT = 64
#: Pieces of work (tasks x KV heads) a thread should get, so that unequal ones even out.
UNITS_PER_THREAD = 4
#: Workgroups of decode attention that a multiprocessor runs at once: an H200's, by their shared memory.
GROUPS_PER_UNIT = 4
#: Tiles are not cut below this, however many threads are idle: every task reads all its keys again.
MIN_TILE_ROWS = 4


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros that start at a multiple of :data:`ALIGNMENT` bytes."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


#: First row, end row, where page 0 is in the page table, row page, page, first page that a row sees: rows of
#: one sequence in one page. Pages that a sequence has released are not in the table, only counted.
_Span = tuple[int, int, int, int, int, int]
_Task = tuple[int, int, int, int, int, int, int]


class StepPlan:
    """The arrays of one step, for ``num_rows`` rows of ``num_sequences`` sequences.

    Parameters
    ----------
    cache : PagedKVCache
        The cache whose sequences grow.
    max_rows : int
        Most rows of a step (the prefill chunk, or the batch where that is larger).
    max_table_pages : int
        Most sealed pages of all sequences of a step together.
    split_pages, scratch_slots, tile_rows : int
        ``attention`` of the library's metadata: pages of a split, slots for partial results, and most
        rows of a task.
    on_gpu : bool
        Order attention tasks by their cost, of as many splits as suits ``threads`` multiprocessors; else deal
        them out to ``threads`` shares, a split of a split row each.

    Attributes
    ----------
    positions, append_slots : numpy.ndarray
        int32 ``[max_rows]``; the first ``num_rows`` are the step's.
    page_table : numpy.ndarray
        int32 ``[max_table_pages]``.
    plan_counts : numpy.ndarray
        int32 ``[4]``: seal, carry, attention and merge tasks.
    seal_tasks, carry_tasks, attention_tasks, merge_tasks : numpy.ndarray
        int32 ``[.., 2]``, ``[.., 2]``, ``[.., 7]``, ``[.., 3]``.
    table_entries : int
        Entries of ``page_table`` that the step uses.
    spans : list of tuple
        The step's rows, those of each page together, in order: first row, end row, where page 0 is in the
        page table, row page, page, and the first page that a row sees.
    kv_faults : numpy.ndarray
        int32 ``[max_rows, 2]``, zeroed by ``build_step``: NaNs replaced and values saturated, per row.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        max_rows: int,
        max_table_pages: int,
        split_pages: int,
        scratch_slots: int,
        tile_rows: int = 16,
        on_gpu: bool = False,
    ) -> None:
        self.cache = cache
        self.max_rows = max_rows
        self.split_pages = split_pages
        self.scratch_slots = scratch_slots
        self.tile_rows = tile_rows
        self.on_gpu = on_gpu
        num_open = cache.open_pages.num_open
        self.positions = aligned_zeros((max_rows,), np.int32)
        self.append_slots = aligned_zeros((max_rows,), np.int32)
        self.kv_faults = aligned_zeros((max_rows, 2), np.int32)
        self.page_table = aligned_zeros((max(1, max_table_pages),), np.int32)
        self.plan_counts = aligned_zeros((4,), np.int32)
        self.seal_tasks = aligned_zeros((num_open + cache.num_workspace, 3), np.int32)
        self.carry_tasks = aligned_zeros((max(1, num_open), 2), np.int32)
        self.attention_tasks = aligned_zeros((max_rows + scratch_slots, 7), np.int32)
        self.merge_tasks = aligned_zeros((max(1, scratch_slots // 2), 3), np.int32)
        self.num_rows = 0
        self.num_sequences = 0
        self.table_entries = 0
        self.spans: list[_Span] = []

    def commit(self) -> None:
        """The step ran: lengths and page tables advance."""
        self.cache.commit_step()

    def abort(self) -> None:
        """The step did not run: give its pages back."""
        self.cache.abort_step()


def build_step(
    plan: StepPlan, requests: list[tuple[SequenceId, int]], threads: int, cut_attention: bool = True
) -> StepPlan:
    """Reserve the pages of a step and fill its arrays; ``plan.commit()`` follows when it has run.

    Parameters
    ----------
    plan : StepPlan
        Filled in place and returned.
    requests : list of (sequence id, int)
        New rows of each sequence, in the order of the step's rows.
    threads : int
        Threads of the device, or a GPU's multiprocessors; decides how attention is cut into tasks.
    cut_attention : bool
        Whether to cut it here; else there are no attention and merge tasks, and the spans say what to cut.

    Raises
    ------
    CacheError
        If the step has more rows, page-table entries, pool pages or workspace pages than there are;
        nothing changes.
    """
    rows = sum(count for _, count in requests)
    if rows > plan.max_rows:
        raise CacheError(f"the step has {rows} rows, the library's limit is {plan.max_rows}")
    appends = plan.cache.begin_step(requests)
    try:
        _fill(plan, appends, rows)
        if cut_attention:
            _fill_attention(plan, threads)
    except BaseException:
        plan.abort()
        raise
    return plan


def _fill(plan: StepPlan, appends: list[Append], rows: int) -> None:
    cache = plan.cache
    size, num_open = cache.page_size, cache.open_pages.num_open
    # Plain lists, assigned once: a numpy assignment for each sequence would cost more than the rest.
    positions: list[int] = []
    slots: list[int] = []
    table = array("i")
    seals: list[tuple[int, int, int]] = []
    carries: list[tuple[int, int]] = []
    spans: list[_Span] = []
    row, workspace, seen = 0, num_open, 0
    for append in appends:
        sequence, start, new = append.sequence, append.start, append.new_pages
        row_page = sequence.open_page
        table_start = len(table) - sequence.first_page
        table.extend(sequence.pages)
        if cache.window is not None:
            seen = cache.first_page_seen(start)
        if append.count == 1 and not new:
            positions.append(start)
            slots.append(row_page * size + start % size)
            spans.append((row, row + 1, table_start, row_page, start // size, seen))
            row += 1
            continue
        end = start + append.count
        table.extend(new)
        first_page = start // size
        for page in range(first_page, (end - 1) // size + 1):
            stop = min(end, (page + 1) * size)
            if page > first_page:
                row_page, workspace = workspace, workspace + 1
            slot, count = row_page * size + start % size, stop - start
            positions.extend(range(start, stop))
            slots.extend(range(slot, slot + count))
            spans.append((row, row + count, table_start, row_page, page, cache.first_page_seen(start)))
            if stop % size == 0:
                seals.append((row_page, new[page - first_page], row + count - 1))
            elif row_page >= num_open:
                carries.append((row_page - num_open, sequence.open_page))
            row += count
            start = stop
    if len(table) > len(plan.page_table):
        raise CacheError(
            f"the step's page table has {len(table)} entries, room is for {len(plan.page_table)}"
        )
    plan.positions[:rows] = positions
    plan.append_slots[:rows] = slots
    plan.page_table[: len(table)] = table
    plan.table_entries = len(table)
    if seals:
        plan.seal_tasks[: len(seals)] = seals
    if carries:
        plan.carry_tasks[: len(carries)] = carries
    plan.plan_counts[:] = (len(seals), len(carries), 0, 0)
    plan.kv_faults[:rows] = 0
    plan.num_rows = rows
    plan.num_sequences = len(appends)
    plan.spans = spans


def _fill_attention(plan: StepPlan, threads: int) -> None:
    """The tasks of attention and of merging, in the order in which the device should take them."""
    tasks, merges = _attention(plan.spans, plan, threads)
    if plan.on_gpu:
        # of equal ones a row's last: with it is the row's own page
        tasks.sort(key=lambda task: (_splits(task), task[5]), reverse=True)
    else:
        tasks = _deal(tasks, threads)
    plan.attention_tasks[: len(tasks)] = tasks
    if merges:
        plan.merge_tasks[: len(merges)] = merges
    plan.plan_counts[2:] = (len(tasks), len(merges))


def _attention(
    spans: list[_Span], plan: StepPlan, threads: int
) -> tuple[list[_Task], list[tuple[int, int, int]]]:
    """Cut the rows of each page into tasks, aiming at some tasks x KV heads for each thread.

    A task brings every page it reads to float32 once, for all of its rows: so tiles are as large as the
    kernels take, and smaller only where threads would have nothing to do. Splitting a single row costs
    nothing but the merge.
    """
    heads = plan.cache.layout.num_kv_heads
    split_pages, slots = plan.split_pages, plan.scratch_slots
    tile = plan.tile_rows
    count = sum(-(-(end - first) // tile) for first, end, *_ in spans)
    while tile > MIN_TILE_ROWS and count * heads < threads:
        tile //= 2
        count = sum(-(-(end - first) // tile) for first, end, *_ in spans)
    may_split = count * heads < threads * UNITS_PER_THREAD
    together, used = 1, 0
    if plan.on_gpu:
        splits = sum(page // split_pages + 1 - seen // split_pages for *_, page, seen in spans)
        together = max(splits_together(splits * heads, threads), -(-splits // max(1, slots)))
    tasks: list[_Task] = []
    merges: list[tuple[int, int, int]] = []
    for first, end, table, row_page, page, seen in spans:
        low, high = seen // split_pages, page // split_pages + 1
        parts = cut_row(low, high, together)
        if may_split and 1 < len(parts) <= slots - used and end == first + 1:
            own = (first, end, table, row_page)
            tasks.extend((*own, *part, used + i) for i, part in enumerate(parts))
            merges.append((first, used, len(parts)))
            used += len(parts)
            continue
        for row in range(first, end, tile):
            tasks.append((row, min(row + tile, end), table, row_page, low, high, -1))
    return tasks, merges


def splits_together(splits: int, units: int) -> int:
    """Of ``splits`` (times KV heads), those that a task should have on a GPU of ``units`` multiprocessors."""
    return max(1, -(-splits // (units * GROUPS_PER_UNIT)))


def cut_row(low: int, high: int, together: int) -> list[tuple[int, int]]:
    """Splits ``low .. high - 1`` of a row in parts of about ``together``: first and end of each."""
    parts = max(1, (2 * (high - low) + together) // (2 * together))
    bounds = [low + i * (high - low) // parts for i in range(parts + 1)]
    return list(pairwise(bounds))


def _splits(task: _Task) -> int:
    """Splits of keys that a task goes through: what it costs."""
    return task[5] - task[4]


def _deal(tasks: list[_Task], shares: int) -> list[_Task]:
    """Reorder tasks so that equal contiguous shares cost about the same.

    Tasks come in order of rows, hence of rising cost within a sequence. Dealing them back and forth
    gives every share early and late ones.
    """
    if shares == 1 or len(tasks) <= shares:
        return tasks
    hands: list[list[_Task]] = [[] for _ in range(shares)]
    for index, task in enumerate(tasks):
        turn, place = divmod(index, shares)
        hands[place if turn % 2 == 0 else shares - 1 - place].append(task)
    return [task for hand in hands for task in hand]
