"""The state machine of the paged KV cache: pages, sequences, and who owns what.

It moves numbers only; the tensors belong to the loaded library. ``P`` is the page size.

======================  ========================  ===================================================
what                    owned by                  released when
======================  ========================  ===================================================
pool page, free         ``PagePool``'s free list  a step takes it
pool page, reserved     the open step             ``commit_step`` hands it on, ``abort_step`` frees it
pool page, sealed       every sequence whose      its last holder drops it (``remove_sequence``,
                        table lists it (shared),  ``popn`` or ``release_unseen``, the prefix cache's
                        and the prefix cache      ``evict``); until then it is never rewritten
open page               exactly one sequence,     ``remove_sequence``; a page that becomes full is
                        from add/fork to remove   sealed into the pool, and the open page starts anew
======================  ========================  ===================================================

Invariants, which ``check_integrity`` recomputes: the count of a pool page is the number of tables
that list it (plus one while reserved, and one if the prefix cache holds it); a page is free exactly
when its count is zero; a sequence of ``n`` tokens lists ``n // P`` sealed pages, but for the first ones
that it released, and its other ``n % P`` tokens stand in its open page.

A sealed page is immutable. So a sequence cut inside one loses that page whole: it then ends at the
page's start, and the caller runs the missing tokens (at most P - 1) again. Nothing is quantized twice.

Where every layer of a model slides, no later row sees the tokens before the widest window, and
``release_unseen`` drops the pages that lie wholly there. A sequence that is then cut to where it would see
them again has to start anew: the caller runs all of its tokens.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from kvq.errors import CacheError
from kvq.layout import KVLayout
from kvq.runtime.cache_shape import most_pages
from kvq.runtime.page_pool import OpenPages, PagePool

SequenceId = Hashable


@dataclass(eq=False)
class Sequence:
    """One token sequence: its open page, its sealed pages from ``first_page`` on, its length in tokens."""

    open_page: int
    pages: array[int] = field(default_factory=lambda: array("i"))
    length: int = 0
    first_page: int = 0


@dataclass(eq=False, slots=True)
class Append:
    """A sequence's share of a step: ``count`` rows from position ``start``, pages that become full."""

    sequence: Sequence
    start: int
    count: int
    new_pages: list[int]


class PagedKVCache:
    """Sequences over a pool of sealed pages and a set of open pages.

    Parameters
    ----------
    layout : KVLayout
        Geometry; only its page size matters here.
    num_pages, num_open, num_workspace : int
        Sealed pages in the pool, open pages (sequences at once), row pages of a step's workspace.
    copy_open : callable, optional
        ``copy_open(src, dst)`` copies the rows of an open page; only a fork calls it.
    window : int, optional
        Tokens that a row sees in any layer, its own among them; None: all before it.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        num_open: int,
        num_workspace: int,
        copy_open: Callable[[int, int], None] | None = None,
        window: int | None = None,
    ) -> None:
        self.layout = layout
        self.page_size = layout.page_size
        self.num_workspace = num_workspace
        self.window = window
        self.pool = PagePool(num_pages)
        self.open_pages = OpenPages(num_open)
        self._copy_open = copy_open
        self._sequences: dict[SequenceId, Sequence] = {}
        self._step: list[Append] | None = None

    # ---- queries: none of these modifies the cache ---------------------------------------------
    @property
    def capacity(self) -> int:
        """Tokens that the pool of sealed pages holds."""
        return self.pool.num_pages * self.page_size

    @property
    def num_free_pages(self) -> int:
        """Sealed pages that nobody holds."""
        return self.pool.num_free

    @property
    def sequence_ids(self) -> list[SequenceId]:
        """Ids of all sequences, in order of addition."""
        return list(self._sequences)

    def __contains__(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._sequences

    def sequence(self, sequence_id: SequenceId) -> Sequence:
        """Look a sequence up.

        Raises
        ------
        CacheError
            If there is none of that id.
        """
        try:
            return self._sequences[sequence_id]
        except KeyError:
            raise CacheError(f"no sequence {sequence_id!r} in the KV cache") from None

    def length(self, sequence_id: SequenceId) -> int:
        """Tokens of a sequence."""
        sequence = self._sequences.get(sequence_id)
        return self.sequence(sequence_id).length if sequence is None else sequence.length

    def first_page_seen(self, position: int) -> int:
        """The first page that a row at ``position`` sees in any layer."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.page_size

    def unseen_pages(self, sequence_id: SequenceId) -> int:
        """Pages of a sequence that no later row of it sees; without a window, none."""
        if self.window is None:
            return 0
        sequence = self.sequence(sequence_id)
        return max(0, self.first_page_seen(sequence.length) - sequence.first_page)

    def most_pages(self, tokens: int, rows: int) -> int:
        """Most sealed pages that a sequence lists while it grows to ``tokens``, by at most ``rows`` a step.

        What it leaves behind is released after every step.
        """
        return most_pages(self.page_size, self.window, tokens, rows)

    @property
    def longest_sequence(self) -> int | None:
        """Sealed tokens of the longest sequence that the pool can take; None: of any length."""
        endless = self.window is not None and self.most_pages(sys.maxsize, 1) <= self.pool.num_pages
        return None if endless else self.capacity

    def pages_needed(self, sequence_id: SequenceId, count: int) -> int:
        """Sealed pages that ``count`` more tokens of a sequence take from the pool."""
        length = self.sequence(sequence_id).length
        return (length + count) // self.page_size - length // self.page_size

    def workspace_needed(self, sequence_id: SequenceId, count: int) -> int:
        """Workspace pages of a step that appends ``count`` rows: the pages after the first it touches."""
        length = self.sequence(sequence_id).length
        return (length + count - 1) // self.page_size - length // self.page_size

    def can_append(self, requests: Iterable[tuple[SequenceId, int]]) -> bool:
        """Whether one step can append ``(sequence id, rows)`` for all requests together."""
        pages = workspace = 0
        for sequence_id, count in requests:
            pages += self.pages_needed(sequence_id, count)
            workspace += self.workspace_needed(sequence_id, count)
        return pages <= self.pool.num_free and workspace <= self.num_workspace

    # ---- sequences -----------------------------------------------------------------------------
    def add_sequence(self, sequence_id: SequenceId, pages: Iterable[int] = ()) -> None:
        """Start a sequence, empty or with sealed pages that others hold too; takes an open page.

        Parameters
        ----------
        pages : iterable of int
            Pages in use that hold the sequence's first tokens, of the prefix cache for example. Those that no
            later row sees are not taken.

        Raises
        ------
        CacheError
            If the id exists, a page is free, or no open page is; nothing changes.
        """
        self._check_idle()
        if sequence_id in self._sequences:
            raise CacheError(f"sequence {sequence_id!r} exists already")
        table = array("i", pages)
        unused = [page for page in table if not self.pool.references(page)]
        if unused:
            raise CacheError(f"page {unused[0]} is free and cannot be shared")
        length = len(table) * self.page_size
        first = self.first_page_seen(length)
        sequence = Sequence(self.open_pages.allocate(), table[first:], length, first)
        for page in sequence.pages:
            self.pool.share(page)
        self._sequences[sequence_id] = sequence

    def replace_pages(self, sequence_id: SequenceId, pages: Iterable[int]) -> None:
        """List other pages of the same content for the first that a sequence lists; its own are dropped."""
        self._check_idle()
        table = self.sequence(sequence_id).pages
        for index, page in enumerate(pages):
            if table[index] != page:
                self.pool.share(page)
                self.pool.release(table[index])
                table[index] = page

    def release_unseen(self, sequence_id: SequenceId) -> int:
        """Drop a sequence's pages that no later row of it sees; returns how many."""
        self._check_idle()
        sequence, count = self.sequence(sequence_id), self.unseen_pages(sequence_id)
        for page in sequence.pages[:count]:
            self.pool.release(page)
        del sequence.pages[:count]
        sequence.first_page += count
        return count

    def remove_sequence(self, sequence_id: SequenceId) -> None:
        """Drop a sequence and its hold on its pages; its forks keep theirs."""
        self._check_idle()
        sequence = self.sequence(sequence_id)
        del self._sequences[sequence_id]
        self._truncate(sequence, 0)
        self.open_pages.release(sequence.open_page)

    def fork_sequence(self, parent: SequenceId, child: SequenceId, position: int | None = None) -> int:
        """Start ``child`` with the parent's first ``position`` tokens (all of them by default).

        Sealed pages are shared; only rows in the parent's open page are copied.

        Returns
        -------
        int
            Tokens before ``position`` that the caller must run again: 0 .. P - 1, or all of them where rows
            from there on would see released pages.

        Raises
        ------
        CacheError
            If the parent is unknown, the child exists, the position is past the parent's end, or no
            open page is free; nothing changes.
        """
        self._check_idle()
        source = self.sequence(parent)
        if child in self._sequences:
            raise CacheError(f"sequence {child!r} exists already")
        if position is None:
            position = source.length
        if not 0 <= position <= source.length:
            raise CacheError(f"cannot fork at {position}: sequence {parent!r} has {source.length} tokens")
        target = Sequence(self.open_pages.allocate())
        target.length = self._reachable(source, position)
        target.first_page = source.first_page if target.length else 0
        target.pages = source.pages[: target.length // self.page_size - target.first_page]
        for page in target.pages:
            self.pool.share(page)
        if target.length % self.page_size and self._copy_open is not None:
            self._copy_open(source.open_page, target.open_page)
        self._sequences[child] = target
        return position - target.length

    def popn(self, sequence_id: SequenceId, count: int) -> int:
        """Drop the last ``count`` tokens.

        Returns
        -------
        int
            Tokens before the new end that the caller must run again: 0 .. P - 1, because a sealed page
            cannot be cut, or all of them where rows from there on would see released pages.

        Raises
        ------
        CacheError
            If the sequence is unknown or shorter than ``count``; nothing changes.
        """
        self._check_idle()
        sequence = self.sequence(sequence_id)
        if not 0 <= count <= sequence.length:
            raise CacheError(f"cannot pop {count} tokens: sequence {sequence_id!r} has {sequence.length}")
        position = sequence.length - count
        length = self._reachable(sequence, position)
        self._truncate(sequence, length)
        return position - length

    def _reachable(self, sequence: Sequence, position: int) -> int:
        """The longest length <= position at which the sequence can be cut."""
        in_open_page = position >= (sequence.first_page + len(sequence.pages)) * self.page_size
        length = position if in_open_page else position // self.page_size * self.page_size
        return length if self.first_page_seen(length) >= sequence.first_page else 0

    def _truncate(self, sequence: Sequence, length: int) -> None:
        keep = max(0, length // self.page_size - sequence.first_page)
        for page in reversed(sequence.pages[keep:]):
            self.pool.release(page)
        del sequence.pages[keep:]
        sequence.length = length
        if not length:
            sequence.first_page = 0

    # ---- steps ---------------------------------------------------------------------------------
    def begin_step(self, requests: list[tuple[SequenceId, int]]) -> list[Append]:
        """Reserve what a step needs: a pool page for every page that becomes full in it.

        Lengths and tables change in ``commit_step``; until then only queries are allowed.

        Parameters
        ----------
        requests : list of (sequence id, int)
            New rows of each sequence, at least one; a sequence appears once.

        Raises
        ------
        CacheError
            If pool or workspace have too few pages, or a request is malformed; nothing changes.
        """
        self._check_idle()
        size, sequences = self.page_size, self._sequences
        appends = []
        pages = workspace = 0
        for sequence_id, count in requests:
            sequence = sequences.get(sequence_id) or self.sequence(sequence_id)
            if count < 1:
                raise CacheError(f"cannot append {count} tokens to sequence {sequence_id!r}")
            start = sequence.length
            appends.append(Append(sequence, start, count, []))
            if start % size + count >= size:
                first, end = start // size, start + count
                pages += end // size - first
                workspace += (end - 1) // size - first
        if len(dict(requests)) < len(requests):
            raise CacheError("a sequence appears twice in one step")
        if pages > self.pool.num_free:
            raise CacheError(
                f"out of KV pages: the step needs {pages}, {self.pool.num_free} of {self.pool.num_pages} are "
                "free"
            )
        if workspace > self.num_workspace:
            raise CacheError(
                f"the step needs {workspace} workspace pages of {self.num_workspace}: append fewer tokens "
                "at once"
            )
        if pages:
            for append in appends:
                if append.start % size + append.count >= size:
                    full = range(append.start // size, (append.start + append.count) // size)
                    append.new_pages = [self.pool.allocate() for _ in full]
        self._step = appends
        return appends

    def commit_step(self) -> None:
        """The open step has run: its pages are sealed, its tokens count."""
        assert self._step is not None, "no step is open"
        for append in self._step:
            append.sequence.length += append.count
            if append.new_pages:
                append.sequence.pages.extend(append.new_pages)
        self._step = None

    def abort_step(self) -> None:
        """The open step never ran: free what it reserved; every sequence is as before.

        A step that failed while it ran may have replaced open pages: remove its sequences afterwards.
        """
        assert self._step is not None, "no step is open"
        for append in self._step:
            for page in append.new_pages:
                self.pool.release(page)
        self._step = None

    def _check_idle(self) -> None:
        if self._step is not None:
            raise CacheError("a step is open: commit or abort it first")

    # ---- integrity -----------------------------------------------------------------------------
    def check_integrity(self) -> None:
        """Recompute every total from the sequences; does not modify the cache.

        Raises
        ------
        CacheError
            With the numbers that do not agree.
        """
        held: Counter[int] = Counter()
        for sequence_id, sequence in self._sequences.items():
            expected = sequence.length // self.page_size - sequence.first_page
            if len(sequence.pages) != expected:
                raise CacheError(
                    f"sequence {sequence_id!r} of {sequence.length} tokens lists {len(sequence.pages)} "
                    f"sealed pages, not {expected}"
                )
            if sequence.first_page > self.first_page_seen(sequence.length):
                raise CacheError(f"sequence {sequence_id!r} lacks pages that its next row sees")
            held.update(sequence.pages)
        for append in self._step or ():
            held.update(append.new_pages)
        self.pool.check_integrity(held)
        self.open_pages.check_integrity([s.open_page for s in self._sequences.values()])
