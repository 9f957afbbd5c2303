"""A task of attention, as the plan of a step has it, and the row page of its own rows."""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm.script import tirx as T

from kvq.layout import KVLayout
from kvq.schedules.attention_variant import AttentionVariant
from kvq.schedules.cache_arguments import AttentionArguments

from .block import either, held

#: Key pages of a split.
SPLIT_PAGES = 4


class AttentionTask(NamedTuple):
    """A task: its rows, where page 0 is in the table, its pages (with its own or without), its slot."""

    first_row: Any
    num_rows: Any
    table: Any
    row_page: Any
    begin: Any
    own_page: Any
    sealed_end: Any
    end: Any
    slot: Any


def read_task(a: AttentionArguments, layout: KVLayout, variant: AttentionVariant, at: Any) -> AttentionTask:
    """Task ``at`` of the list."""
    tasks, page_shift = a.tasks, layout.page_size.bit_length() - 1
    first_row = T.bind(tasks[at, 0])
    position = T.bind(a.positions[first_row])
    own_page = T.bind(T.shift_right(position, page_shift))
    begin, end = tasks[at, 4] * SPLIT_PAGES, T.bind(tasks[at, 5] * SPLIT_PAGES)
    if variant.window is not None:
        seen = T.max(position - (variant.window - 1), 0)
        begin = T.max(begin, T.shift_right(seen, page_shift))
    return AttentionTask(
        first_row,
        T.bind(tasks[at, 1] - first_row),
        T.bind(tasks[at, 2]),
        T.bind(tasks[at, 3]),
        T.bind(begin),
        own_page,
        T.bind(T.min(end, own_page)),
        T.bind(T.min(end, own_page + 1)),
        T.bind(tasks[at, 6]),
    )


def each_own(a: AttentionArguments, task: AttentionTask, kv_head: Any, body) -> None:
    """Emit ``body(row)`` for the own page, ``row(part, i)`` a number of it, wherever it stands."""
    own, num_open = task.row_page, T.cast(a.num_open, "int32")

    def number(rows, where):
        return lambda part, i: T.cast(rows[(*where, part, i)], "float32")

    either(
        own < num_open,
        lambda: body(number(a.kv_open, (own, a.layer, kv_head))),
        lambda: body(number(a.workspace, (own - num_open, kv_head))),
    )


def own_end(a: AttentionArguments, layout: KVLayout, task: AttentionTask) -> Any:
    """Tokens of the own page that the last row of the task sees."""
    last = a.positions[task.first_row + task.num_rows - 1]
    return held(T.bitwise_and(last, layout.page_size - 1) + 1)
