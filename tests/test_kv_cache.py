"""The KV cache's book-keeping: rules one by one, then random traces against an oracle."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from kv_oracle import FakeDevice
from kvq.errors import CacheError
from kvq.layout import KVLayout
from kvq.runtime.kv_cache import PagedKVCache
from kvq.runtime.page_pool import PagePool

P = 32


def grow(device: FakeDevice, sequence: str, count: int) -> None:
    """A sequence of ``count`` tokens, in steps that fit the workspace."""
    device.cache.add_sequence(sequence)
    device.tokens[sequence] = []
    for start in range(0, count, 3 * P):
        device.append([(sequence, min(3 * P, count - start))])


def test_page_is_sealed_in_the_step_that_fills_it() -> None:
    device = FakeDevice(4, 2, 4)
    grow(device, "a", P - 1)
    assert device.cache.num_free_pages == 4
    device.append([("a", 1)])
    assert device.cache.num_free_pages == 3
    assert list(device.plan.seal_tasks[0]) == [device.cache.sequence("a").open_page, 0, 0]
    device.append([("a", 1)])
    assert device.cache.length("a") == P + 1


def test_capacity_is_filled_exactly() -> None:
    device = FakeDevice(5, 1, 6)
    grow(device, "a", device.cache.capacity - 1)
    assert device.cache.can_append([("a", 1)])
    device.append([("a", 1)])
    assert device.cache.length("a") == device.cache.capacity == 5 * P
    device.append([("a", P - 1)])  # the open page still has room
    assert not device.cache.can_append([("a", 1)])
    with pytest.raises(CacheError, match="needs 1, 0 of 5 are free"):
        device.append([("a", 1)])
    assert device.cache.length("a") == 6 * P - 1
    device.cache.check_integrity()


@pytest.mark.parametrize(
    ("length", "count", "left", "recompute"),
    [
        (P + 5, 5, P, 0),
        (P + 5, 4, P + 1, 0),
        (P + 5, 6, 0, P - 1),
        (2 * P, P, P, 0),
        (2 * P, 1, P, P - 1),
        (2 * P, 0, 2 * P, 0),
        (3 * P + 1, 3 * P + 1, 0, 0),
        (3 * P + 1, 2 * P, P, 1),
    ],
)
def test_popn(length: int, count: int, left: int, recompute: int) -> None:
    device = FakeDevice(8, 2, 4)
    grow(device, "a", length)
    assert device.cache.popn("a", count) == recompute
    assert device.cache.length("a") == left
    assert device.cache.num_free_pages == 8 - left // P
    device.cache.check_integrity()


def test_a_sequence_of_pages_that_nobody_holds_is_refused() -> None:
    device = FakeDevice(8, 2, 4)
    grow(device, "a", 2 * P)
    with pytest.raises(CacheError, match="page 2 is free and cannot be shared"):
        device.cache.add_sequence("b", [0, 1, 2])
    assert device.cache.sequence_ids == ["a"] and device.cache.pool.references(0) == 1
    device.cache.add_sequence("b", [0, 1])
    device.tokens["b"] = device.tokens["a"][:]
    device.cache.remove_sequence("a")
    device.append([("b", P + 3)])
    assert device.cache.num_free_pages == 5
    device.cache.check_integrity()


def test_popn_past_the_start_changes_nothing() -> None:
    device = FakeDevice(8, 2, 4)
    grow(device, "a", P + 3)
    for count in (P + 4, -1):
        with pytest.raises(CacheError, match=f"cannot pop {count} tokens"):
            device.cache.popn("a", count)
    assert device.cache.length("a") == P + 3


@pytest.mark.parametrize(
    ("position", "length", "shared", "copied"),
    [
        (None, 2 * P + 7, 2, 1),
        (2 * P + 3, 2 * P + 3, 2, 1),
        (2 * P, 2 * P, 2, 0),
        (P + 9, P, 1, 0),
        (0, 0, 0, 0),
    ],
)
def test_fork(position: int | None, length: int, shared: int, copied: int) -> None:
    copies: list[tuple[int, int]] = []
    device = FakeDevice(8, 2, 4)
    grow(device, "a", 2 * P + 7)
    device.cache._copy_open = lambda src, dst: copies.append((src, dst))
    recompute = device.cache.fork_sequence("a", "b", position)
    asked = 2 * P + 7 if position is None else position
    assert (device.cache.length("b"), recompute) == (length, asked - length)
    assert len(copies) == copied
    assert device.cache.num_free_pages == 6
    assert [device.cache.pool.references(p) for p in device.cache.sequence("a").pages[:shared]] == [
        2
    ] * shared
    device.cache.remove_sequence("a")  # a parent may go before its child
    assert device.cache.num_free_pages == 8 - shared
    device.cache.check_integrity()


def test_failures_change_nothing() -> None:
    device = FakeDevice(2, 1, 4)
    grow(device, "a", P)
    for action in (
        lambda: device.cache.add_sequence("a"),
        lambda: device.cache.add_sequence("b"),
        lambda: device.cache.fork_sequence("a", "b"),
        lambda: device.cache.fork_sequence("a", "b", P + 1),
        lambda: device.cache.remove_sequence("z"),
        lambda: device.cache.begin_step([("a", 0)]),
        lambda: device.cache.begin_step([("a", 1), ("a", 1)]),
        lambda: device.cache.begin_step([("a", 2 * P)]),
    ):
        with pytest.raises(CacheError):
            action()
        device.cache.check_integrity()
        assert device.cache.length("a") == P and device.cache.num_free_pages == 1
        assert device.cache.sequence_ids == ["a"]


def test_too_few_workspace_pages() -> None:
    cache = PagedKVCache(KVLayout(1, 1, 64, page_size=P), 9, 1, 2)
    cache.add_sequence("a")
    with pytest.raises(CacheError, match="needs 3 workspace pages of 2"):
        cache.begin_step([("a", 3 * P + 1)])
    assert cache.num_free_pages == 9
    assert len(cache.begin_step([("a", 3 * P)])[0].new_pages) == 3


def test_an_aborted_step_gives_its_pages_back() -> None:
    cache = PagedKVCache(KVLayout(1, 1, 64, page_size=P), 9, 1, 2)
    cache.add_sequence("a")
    cache.begin_step([("a", 2 * P)])
    assert cache.num_free_pages == 7
    cache.check_integrity()
    with pytest.raises(CacheError, match="a step is open"):
        cache.popn("a", 0)
    cache.abort_step()
    assert cache.num_free_pages == 9 and cache.length("a") == 0
    cache.check_integrity()


def test_pool_refuses_wrong_counts() -> None:
    pool = PagePool(1)
    with pytest.raises(CacheError, match="already free"):
        pool.release(0)
    with pytest.raises(CacheError, match="free and cannot be shared"):
        pool.share(0)
    page = pool.allocate()
    with pytest.raises(CacheError, match="all 1 are in use"):
        pool.allocate()
    pool.share(page)
    pool.release(page)
    assert pool.num_free == 0
    pool.release(page)
    assert pool.num_free == 1


def test_check_integrity_finds_a_leak() -> None:
    device = FakeDevice(4, 2, 4)
    grow(device, "a", 2 * P)
    device.cache.pool.share(device.cache.sequence("a").pages[0])
    with pytest.raises(CacheError, match="counts 2 holders, but 1"):
        device.cache.check_integrity()


@pytest.mark.parametrize(
    ("window", "count", "left", "recompute"),
    [
        (P, 0, 4 * P + 5, 0),
        (P, 5, 4 * P, 0),
        (P, 6, 0, 4 * P - 1),  # cut to 3 P, where a row sees page 2
        (P + 6, 1, 0, 4 * P + 4),  # the last token was the first that does not see page 2
        (3 * P, 1, 4 * P + 4, 0),
        (3 * P, 3 * P, 0, P + 5),
    ],
)
def test_popn_to_where_released_pages_would_be_seen(
    window: int, count: int, left: int, recompute: int
) -> None:
    device = FakeDevice(8, 2, 4, window=window)
    grow(device, "a", 4 * P + 5)
    device.cache.release_unseen("a")
    assert device.cache.popn("a", count) == recompute
    assert device.cache.length("a") == left
    device.tokens["a"] = device.tokens["a"][:left]
    device.append([("a", P + 1)])
    device.cache.check_integrity()


class CacheMachine(RuleBasedStateMachine):
    """Random add, append, fork, popn, release and remove; every query must see its own sequence in order."""

    sequences = Bundle("sequences")

    @initialize(window=st.sampled_from([None, None, 1, P - 1, P, P + 1, 3 * P]))
    def build(self, window: int | None) -> None:
        self.device = FakeDevice(num_pages=24, num_open=4, num_workspace=6, window=window)
        self.count = 0

    def check_recompute(self, position: int, recompute: int) -> None:
        """Less than a page is run again, or all of it after pages were released."""
        assert 0 <= recompute < P or (recompute == position and self.device.window is not None)

    def alive(self, sequence: int) -> bool:
        return sequence in self.device.tokens

    @rule(target=sequences)
    def add(self) -> object:
        if not self.device.cache.open_pages.num_free:
            with pytest.raises(CacheError):
                self.device.cache.add_sequence(self.count)
            return multiple()
        self.count += 1
        self.device.cache.add_sequence(self.count)
        self.device.tokens[self.count] = []
        return self.count

    @rule(
        wanted=st.lists(
            st.tuples(sequences, st.integers(1, 5 * P)), min_size=1, max_size=4, unique_by=lambda w: w[0]
        ),
        threads=st.sampled_from([1, 2, 16]),
    )
    def append(self, wanted: list[tuple[int, int]], threads: int) -> None:
        requests = [(s, n) for s, n in wanted if self.alive(s)]
        if not requests:
            return
        if self.device.cache.can_append(requests):
            self.device.append(requests, threads)
        else:
            before = {s: list(self.device.tokens[s]) for s, _ in requests}
            with pytest.raises(CacheError):
                self.device.append(requests, threads)
            assert before == {s: self.device.tokens[s] for s, _ in requests}

    @rule(sequence=sequences)
    def decode(self, sequence: int) -> None:
        if self.alive(sequence) and self.device.cache.can_append([(sequence, 1)]):
            self.device.append([(sequence, 1)])

    @rule(target=sequences, parent=sequences, part=st.none() | st.floats(0, 1))
    def fork(self, parent: int, part: float | None) -> object:
        if not self.alive(parent) or not self.device.cache.open_pages.num_free:
            return multiple()
        tokens = self.device.tokens[parent]
        position = None if part is None else round(part * len(tokens))
        self.count += 1
        recompute = self.device.cache.fork_sequence(parent, self.count, position)
        end = len(tokens) if position is None else position
        self.device.tokens[self.count] = tokens[: end - recompute]
        self.check_recompute(end, recompute)
        assert self.device.cache.length(self.count) == end - recompute
        return self.count

    @rule(target=sequences, other=sequences, part=st.floats(0, 1))
    def add_with_pages(self, other: int, part: float) -> object:
        """A sequence that starts from sealed pages of another, which may go before it."""
        if not self.alive(other) or not self.device.cache.open_pages.num_free:
            return multiple()
        held = self.device.cache.sequence(other)
        pages = held.pages[: round(part * len(held.pages))] if not held.first_page else []
        self.count += 1
        self.device.cache.add_sequence(self.count, pages)
        self.device.tokens[self.count] = self.device.tokens[other][: len(pages) * P]
        return self.count

    @rule(sequence=sequences, part=st.floats(0, 1))
    def popn(self, sequence: int, part: float) -> None:
        if not self.alive(sequence):
            return
        tokens = self.device.tokens[sequence]
        count = round(part * len(tokens))
        recompute = self.device.cache.popn(sequence, count)
        self.check_recompute(len(tokens) - count, recompute)
        del tokens[len(tokens) - count - recompute :]

    @rule(sequence=sequences)
    def release(self, sequence: int) -> None:
        """Pages that no later row sees go, and no others."""
        if not self.alive(sequence):
            return
        cache, free = self.device.cache, self.device.cache.num_free_pages
        released = cache.release_unseen(sequence)
        assert free <= cache.num_free_pages <= free + released
        window, length = self.device.window, cache.length(sequence)
        left = 0 if window is None else max(0, length + 1 - window) // P
        assert len(cache.sequence(sequence).pages) == length // P - left

    @rule(sequence=sequences)
    def remove(self, sequence: int) -> None:
        if self.alive(sequence):
            self.device.cache.remove_sequence(sequence)
            del self.device.tokens[sequence]

    @invariant()
    def totals_agree(self) -> None:
        if not hasattr(self, "device"):
            return
        self.device.cache.check_integrity()
        assert set(self.device.cache.sequence_ids) == set(self.device.tokens)
        for sequence, tokens in self.device.tokens.items():
            assert self.device.cache.length(sequence) == len(tokens)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
