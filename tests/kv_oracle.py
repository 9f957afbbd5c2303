"""Executes step plans on fake rows: every token is a number, so what a query sees can be compared exactly."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from kvq.layout import KVLayout
from kvq.runtime.kv_cache import PagedKVCache
from kvq.runtime.step_plan import StepPlan, build_step


class FakeDevice:
    """The tensors of a cache with one number a token, and the four phases of a layer's step."""

    def __init__(
        self,
        num_pages: int,
        num_open: int,
        num_workspace: int,
        page_size: int = 32,
        split_pages: int = 2,
        window: int | None = None,
    ) -> None:
        layout = KVLayout(1, 2, 64, page_size=page_size)
        self.cache = PagedKVCache(layout, num_pages, num_open, num_workspace, self.copy_open, window)
        self.window = window
        self.plan = StepPlan(self.cache, 40 * page_size, num_open * num_pages, split_pages, 6)
        self.pool = np.full((num_pages, page_size), -1)
        self.rows = np.full((num_open + num_workspace, page_size), -1)
        self.tokens: dict[Hashable, list[int]] = {}
        self.num_open, self.page_size, self.next_token = num_open, page_size, 0

    def copy_open(self, src: int, dst: int) -> None:
        self.rows[dst] = self.rows[src]

    def append(self, requests: list[tuple[Hashable, int]], threads: int = 2) -> None:
        """Run a step of fresh tokens and check what each of its rows sees."""
        plan = build_step(self.plan, requests, threads)
        fresh = list(range(self.next_token, self.next_token + plan.num_rows))
        expected: list[list[int]] = []
        positions: list[int] = []
        row = 0
        for sequence, count in requests:
            for _ in range(count):
                self.tokens[sequence].append(fresh[row])
                expected.append(self.tokens[sequence][-(self.window or 0) :])
                positions.append(len(self.tokens[sequence]) - 1)
                row += 1
        self.next_token += plan.num_rows
        assert plan.positions[: len(fresh)].tolist() == positions
        for row, seen in enumerate(self.attend(plan, fresh)):
            assert seen == expected[row], (row, len(expected[row]))
        plan.commit()

    def attend(self, plan: StepPlan, fresh: list[int]) -> list[list[int]]:
        """Execute a plan whose rows carry ``fresh``; the tokens that each row sees, itself included."""
        size = self.page_size
        seal, carry, attention, merge = (int(count) for count in plan.plan_counts)
        positions = [int(p) for p in plan.positions[: len(fresh)]]
        slots = [int(s) for s in plan.append_slots[: len(fresh)]]
        assert len(set(slots)) == len(slots), "two rows in one place"
        for token, slot in zip(fresh, slots, strict=True):
            self.rows[slot // size, slot % size] = token
        for row_page, page, last_row in plan.seal_tasks[:seal]:
            assert slots[last_row] == row_page * size + size - 1, "not the row that completes the page"
            self.pool[page] = self.rows[row_page]
        scratch: dict[int, list[int]] = {}
        output: dict[int, list[int]] = {}
        for first, end, table, row_page, low, high, slot in plan.attention_tasks[:attention].tolist():
            assert end - first == 1 or (slot < 0 and end - first <= plan.tile_rows)
            for row in range(first, end):
                parts = [
                    self.split(plan, positions[row], table, row_page, split) for split in range(low, high)
                ]
                if slot < 0:
                    assert row not in output and low <= self.first_split(plan, positions[row])
                    assert high == self.end_split(plan, positions[row])
                    output[row] = [token for part in parts for token in part]
                    continue
                for index, part in enumerate(parts, slot):
                    assert index not in scratch and index < plan.scratch_slots
                    scratch[index] = part
        for row, slot, count in plan.merge_tasks[:merge].tolist():
            first, end = (of(plan, positions[row]) for of in (self.first_split, self.end_split))
            assert row not in output and count == end - first
            output[row] = [token for s in range(slot, slot + count) for token in scratch.pop(s)]
        assert not scratch, "a partial result was never merged"
        assert sorted(output) == list(range(len(fresh)))
        for source, target in plan.carry_tasks[:carry]:
            self.rows[target] = self.rows[self.num_open + source]
        self.rows[self.num_open :] = -1
        return [output[row] for row in range(len(fresh))]

    def first_seen(self, position: int) -> int:
        return 0 if self.window is None else max(0, position - self.window + 1)

    def first_split(self, plan: StepPlan, position: int) -> int:
        return self.first_seen(position) // self.page_size // plan.split_pages

    def end_split(self, plan: StepPlan, position: int) -> int:
        return position // self.page_size // plan.split_pages + 1

    def split(self, plan: StepPlan, position: int, table: int, row_page: int, split: int) -> list[int]:
        """Tokens of one split of a row: sealed pages, and its own page raw up to itself."""
        own, first = position // self.page_size, self.first_seen(position)
        seen: list[int] = []
        for page in range(split * plan.split_pages, min((split + 1) * plan.split_pages, own + 1)):
            skip = min(max(0, first - page * self.page_size), self.page_size)
            if skip == self.page_size:
                continue  # not in the table, perhaps
            if page < own:
                seen += self.pool[plan.page_table[table + page]].tolist()[skip:]
            else:
                seen += self.rows[row_page, skip : position % self.page_size + 1].tolist()
        return seen
