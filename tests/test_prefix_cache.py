"""The prefix cache: what it finds, holds and gives up; then random traces against a dictionary."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvq.errors import CacheError
from kvq.layout import KVLayout
from kvq.runtime.kv_cache import PagedKVCache
from kvq.runtime.page_pool import PagePool
from kvq.runtime.prefix_cache import PrefixCache

P = 4


def make(num_pages: int = 12) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(num_pages)
    return pool, PrefixCache(pool, P)


def hold(pool: PagePool, prefix: PrefixCache, tokens: list[int]) -> list[int]:
    """Compute the pages of a text, give them to the tree, and let go of them; what the tree lists."""
    pages = [pool.allocate() for _ in range(len(tokens) // P)]
    listed = prefix.insert(tokens, pages)
    for page in pages:
        pool.release(page)
    return listed


@pytest.mark.parametrize(
    ("length", "found"), [(0, 0), (1, 0), (P, 0), (P + 1, 1), (2 * P, 1), (2 * P + 1, 2), (9 * P, 2)]
)
def test_the_page_of_the_last_token_is_never_found(length: int, found: int) -> None:
    pool, prefix = make()
    text = list(range(9 * P))
    pages = hold(pool, prefix, text[: 2 * P])
    assert prefix.match(text[:length]) == pages[:found]


def test_the_most_pages_in_use_are_counted_where_they_are_taken() -> None:
    pool, prefix = make()
    assert pool.peak_used == 0
    pages = hold(pool, prefix, list(range(3 * P)))
    assert pool.peak_used == 3 and pool.num_idle == 3
    for page in pages:  # taken up again, beside two new ones
        pool.share(page)
    more = [pool.allocate(), pool.allocate()]
    for page in (*pages, *more):
        pool.release(page)
    assert pool.peak_used == 5


def test_paths_branch_and_share() -> None:
    pool, prefix = make()
    a = hold(pool, prefix, [1] * P + [2] * P)
    b = hold(pool, prefix, [1] * P + [3] * P)
    assert a[0] == b[0] and a[1] != b[1] and prefix.num_pages == 3
    assert prefix.match([1] * P + [3] * P + [0]) == b
    assert prefix.match([2] * P + [0]) == []
    assert pool.num_free == 12 - 3 and pool.num_idle == 3 and pool.num_available == 12
    prefix.check_integrity()


def test_a_page_of_its_own_is_taken_back_by_the_caller() -> None:
    """Two sequences computed the same page: the second lists the first one's from now on."""
    cache = PagedKVCache(KVLayout(1, 2, 64, page_size=32), 8, 2, 4)
    prefix = PrefixCache(cache.pool, 32)
    tokens = list(range(64))
    for name in "ab":
        cache.add_sequence(name)
        cache.begin_step([(name, 64)])
        cache.commit_step()
    assert cache.num_free_pages == 4
    for name in "ab":
        cache.replace_pages(name, prefix.insert(tokens, cache.sequence(name).pages))
    assert cache.sequence("a").pages == cache.sequence("b").pages and cache.num_free_pages == 6
    cache.check_integrity()
    prefix.check_integrity()
    cache.remove_sequence("a")
    cache.remove_sequence("b")
    assert cache.pool.num_idle == 2 and prefix.evict(5) == 2 and cache.num_free_pages == 8


def test_the_least_recently_used_leaf_goes_first() -> None:
    pool, prefix = make()
    texts = {name: [value] * P + [value + 10] * P for name, value in (("a", 1), ("b", 2), ("c", 3))}
    pages = {name: hold(pool, prefix, text) for name, text in texts.items()}
    prefix.insert(texts["a"], pages["a"])
    assert prefix.evict(3) == 3 and prefix.evicted == 3
    assert prefix.match([*texts["b"], 0]) == []
    assert prefix.match([*texts["c"], 0]) == pages["c"][:1]
    assert prefix.match([*texts["a"], 0]) == pages["a"]


def test_pages_in_use_are_not_evicted() -> None:
    pool, prefix = make()
    used = hold(pool, prefix, [1] * 3 * P)
    for page in used[:2]:
        pool.share(page)
    idle = hold(pool, prefix, [2] * P)
    assert pool.num_idle == 2 and prefix.evict(12) == 2 and prefix.num_pages == 2
    assert prefix.match([1] * 4 * P) == used[:2] and pool.references(idle[0]) == 0
    prefix.clear()
    assert prefix.num_pages == 2
    for page in used[:2]:
        pool.release(page)
    prefix.clear()
    assert pool.num_free == 12 and prefix.num_pages == 0


def test_integrity_sees_what_is_wrong() -> None:
    pool, prefix = make()
    pages = hold(pool, prefix, [1] * 2 * P)
    prefix.check_integrity()
    pool.share(pages[1])  # a child in use without its parent
    with pytest.raises(CacheError, match="in use, but page"):
        prefix.check_integrity()
    pool.release(pages[1])
    pool.release_from_cache(pages[1])
    with pytest.raises(CacheError, match="the pool counts 1"):
        prefix.check_integrity()
    with pytest.raises(CacheError, match="does not hold"):
        pool.release_from_cache(pages[1])
    with pytest.raises(CacheError, match=f"holds page {pages[0]} already"):
        pool.hold_for_cache(pages[0])


class PrefixMachine(RuleBasedStateMachine):
    """Sequences come, publish and go in a small pool; the oracle is a dictionary of known prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.prefix = make(10)
        self.known: dict[tuple[int, ...], int] = {}
        self.running: list[tuple[list[int], list[int]]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5 * P), spread=st.booleans())
    def start(self, tokens: list[int], spread: bool) -> None:
        tokens = [t for t in tokens for _ in range(P)][: 5 * P] if spread else tokens
        found = self.prefix.match(tokens)
        limit = (len(tokens) - 1) // P
        expected = []
        for end in range(P, limit * P + 1, P):
            if tuple(tokens[:end]) not in self.known:
                break
            expected.append(self.known[tuple(tokens[:end])])
        assert found == expected
        if len(tokens) // P - len(found) > self.pool.num_free:
            return
        for page in found:
            self.pool.share(page)
        own = [self.pool.allocate() for _ in range(len(tokens) // P - len(found))]
        self.running.append((tokens, found + own))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        tokens, pages = self.running[data.draw(st.integers(0, len(self.running) - 1))]
        for index, page in enumerate(self.prefix.insert(tokens, pages)):
            assert self.known.setdefault(tuple(tokens[: (index + 1) * P]), page) == page
            if pages[index] != page:
                self.pool.share(page)
                self.pool.release(pages[index])
                pages[index] = page

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        _, pages = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        for page in pages:
            self.pool.release(page)

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        idle = self.pool.num_idle
        assert self.prefix.evict(count) == min(count, idle)
        left = self.pool.cached_pages
        self.known = {tokens: page for tokens, page in self.known.items() if page in left}

    @invariant()
    def whole(self) -> None:
        self.prefix.check_integrity()
        held = [page for _, pages in self.running for page in pages]
        assert self.pool.num_free == 10 - len({*held, *self.known.values()})
        for tokens in self.known:
            assert len(tokens) == P or tokens[:-P] in self.known


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
