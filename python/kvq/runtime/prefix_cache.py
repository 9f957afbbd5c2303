"""The prefix cache: sealed pages of earlier sequences, found again by the tokens that lead to them.

A page's codes depend on nothing but the tokens up to its end. So the tree's edges are whole pages of
tokens, a node is one sealed page, and a path from the root is a prefix that needs no computing.

===========================  ==================================================================
who holds a page             until
===========================  ==================================================================
the tree, once a node        ``evict`` or ``clear``
each sequence that lists it  it is removed from the cache
===========================  ==================================================================

A page that the tree alone holds is *idle*; only idle pages are evicted. A sequence lists the tree's
own pages wherever its tokens are in the tree (``insert`` says which), so whoever holds a node holds
all before it, and a node that is idle has only idle ones behind it.

Unless a sequence has released its first pages: these may be idle, or evicted, before pages that it lists. A
path that is broken cannot be entered, so eviction takes what is behind a node out of the tree with it, and a
sequence whose first pages the tree no longer knows adds no pages to it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvq.errors import CacheError
from kvq.runtime.page_pool import PagePool


@dataclass(eq=False)
class _Node:
    """A sealed page, behind the page of its parent; the root has none."""

    page: int
    key: bytes = b""
    parent: _Node | None = None
    children: dict[bytes, _Node] = field(default_factory=dict)


class PrefixCache:
    """Radix tree over the tokens of whole pages.

    Parameters
    ----------
    pool : PagePool
        Whose pages it holds.
    page_size : int
        Tokens of a page.
    releases : bool
        Whether sequences may release their first pages.

    Attributes
    ----------
    evicted : int
        Pages given up so far, ``clear`` apart.
    """

    def __init__(self, pool: PagePool, page_size: int, releases: bool = False) -> None:
        self._pool = pool
        self._page_size = page_size
        self._releases = releases
        self._root = _Node(-1)
        # Least recently used first. A path is entered from its end, so children stand before parents.
        self._order: OrderedDict[_Node, None] = OrderedDict()
        self.evicted = 0

    @property
    def num_pages(self) -> int:
        """Pages that the tree holds."""
        return len(self._order)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Pages of the longest known prefix of a prompt. Does not modify the tree, nor hold the pages.

        The page of the last token is never among them: its row has to run for its logits.
        """
        node, pages = self._root, []
        for key in self._keys(tokens, (len(tokens) - 1) // self._page_size):
            found = node.children.get(key)
            if found is None:
                break
            pages.append(found.page)
            node = found
        return pages

    def insert(self, tokens: Sequence[int], pages: Iterable[int], first_page: int = 0) -> list[int]:
        """Hold the sealed pages of a sequence, and mark them and all before them as just used.

        Parameters
        ----------
        tokens : sequence of int
            From the first on, at least up to the end of the pages.
        pages : iterable of int
            Pages in use, in order. One whose tokens are in the tree already is not taken.
        first_page : int
            Pages that the sequence has released before them. Where the tree lacks one, it takes nothing.

        Returns
        -------
        list of int
            The page to list for each from now on: the tree's, where it has one.
        """
        given = list(pages)
        node, path = self._root, []
        for index, key in enumerate(self._keys(tokens, first_page + len(given))):
            child = node.children.get(key)
            if child is None:
                if index < first_page:
                    return given
                page = given[index - first_page]
                child = _Node(page, key, node)
                self._pool.hold_for_cache(page)
                node.children[key] = child
            path.append(child)
            node = child
        for child in reversed(path):
            self._order[child] = None
            self._order.move_to_end(child)
        return [child.page for child in path[first_page:]]

    def evict(self, count: int) -> int:
        """Give up idle pages, least recently used first; returns how many, at most ``count``."""
        victims: list[_Node] = []
        for node in self._order:
            if len(victims) >= count:
                break
            if self._pool.references(node.page) == 1:
                victims.append(node)
        for node in victims:
            self._drop(node)
        self.evicted += len(victims)
        return len(victims)

    def clear(self) -> None:
        """Give up every idle page; those of running sequences stay."""
        evicted = self.evicted
        self.evict(self.num_pages)
        self.evicted = evicted

    def check_integrity(self) -> None:
        """Walk the tree and compare it with the pool and the order of use; does not modify anything.

        Raises
        ------
        CacheError
            With what does not agree.
        """
        rank = {node: index for index, node in enumerate(self._order)}
        pages: list[int] = []
        stack = [self._root]
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                if child.key != key or child.parent is not node or child not in rank:
                    raise CacheError(f"the prefix cache's node of page {child.page} is linked wrongly")
                if node is not self._root:
                    if rank[child] > rank[node]:
                        raise CacheError(f"page {child.page} was used after page {node.page} before it")
                    unused = self._pool.references(node.page) == 1
                    if unused and self._pool.references(child.page) > 1 and not self._releases:
                        raise CacheError(
                            f"page {child.page} is in use, but page {node.page} before it is not"
                        )
                pages.append(child.page)
                stack.append(child)
        if len(pages) != len(rank) or len(set(pages)) != len(pages):
            raise CacheError(f"the prefix cache lists {len(rank)} pages, its tree has {len(set(pages))}")
        if set(pages) != self._pool.cached_pages:
            raise CacheError(
                f"the prefix cache has {len(pages)} pages, the pool counts {len(self._pool.cached_pages)}"
            )

    def _drop(self, node: _Node) -> None:
        """Take a node out of the tree, and what is behind it: pages of sequences that released this one."""
        assert node.parent is not None
        assert self._releases or not node.children, "only leaves are evicted"
        del node.parent.children[node.key]
        dropped = [node]
        while dropped:
            node = dropped.pop()
            dropped += node.children.values()
            del self._order[node]
            self._pool.release_from_cache(node.page)

    def _keys(self, tokens: Sequence[int], count: int) -> Iterable[bytes]:
        data = array("i", tokens[: count * self._page_size]).tobytes()
        width = len(data) // count if count else 0
        return (data[i * width : (i + 1) * width] for i in range(count))
