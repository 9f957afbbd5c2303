"""Free lists of page numbers: the pool of sealed pages (counted, shared) and the open pages."""

from __future__ import annotations

from collections import Counter

from kvq.errors import CacheError


class PagePool:
    """Numbers of the sealed pages: a free list, reference counts, and which of them a prefix cache holds.

    Attributes
    ----------
    peak_used : int
        Most pages that sequences held at once so far.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._refs = [0] * num_pages
        self._cached = bytearray(num_pages)
        self._num_idle = 0
        self.peak_used = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Pages that only the prefix cache holds."""
        return self._num_idle

    @property
    def num_available(self) -> int:
        """Pages that are free, or will be as soon as the prefix cache gives them up."""
        return len(self._free) + self._num_idle

    @property
    def cached_pages(self) -> set[int]:
        """Pages that the prefix cache holds. Does not modify the pool."""
        return {page for page, cached in enumerate(self._cached) if cached}

    def references(self, page: int) -> int:
        """Holders of a page. Does not modify the pool."""
        return self._refs[page]

    def allocate(self) -> int:
        """Take a free page, held once.

        Raises
        ------
        CacheError
            If no page is free.
        """
        if not self._free:
            raise CacheError(f"out of KV pages: all {self.num_pages} are in use")
        page = self._free.pop()
        self._refs[page] = 1
        self._note_peak()
        return page

    def share(self, page: int) -> None:
        """Add a holder to a page that is in use."""
        if not self._refs[page]:
            raise CacheError(f"page {page} is free and cannot be shared")
        if self._cached[page] and self._refs[page] == 1:
            self._num_idle -= 1
            self._note_peak()
        self._refs[page] += 1

    def _note_peak(self) -> None:
        self.peak_used = max(self.peak_used, self.num_pages - self.num_available)

    def release(self, page: int) -> None:
        """Drop a holder; the page is free again after its last."""
        if not self._refs[page]:
            raise CacheError(f"page {page} is already free")
        self._refs[page] -= 1
        if not self._refs[page]:
            self._free.append(page)
        elif self._cached[page] and self._refs[page] == 1:
            self._num_idle += 1

    def hold_for_cache(self, page: int) -> None:
        """Add the prefix cache to the holders of a page that is in use."""
        if self._cached[page]:
            raise CacheError(f"the prefix cache holds page {page} already")
        self.share(page)
        self._cached[page] = 1

    def release_from_cache(self, page: int) -> None:
        """The prefix cache drops a page that it holds."""
        if not self._cached[page]:
            raise CacheError(f"the prefix cache does not hold page {page}")
        self._cached[page] = 0
        self._num_idle -= self._refs[page] == 1
        self.release(page)

    def check_integrity(self, held: Counter[int]) -> None:
        """Compare counts and free list with the holders found by the caller, the prefix cache apart.

        Raises
        ------
        CacheError
            With the page and the two numbers that differ.
        """
        for page, refs in enumerate(self._refs):
            holders = held[page] + self._cached[page]
            if refs != holders:
                raise CacheError(f"page {page} counts {refs} holders, but {holders} hold it")
        free = Counter(self._free)
        unused = {page for page, refs in enumerate(self._refs) if not refs}
        if set(free) != unused or len(self._free) != len(unused):
            raise CacheError(f"free list has {len(self._free)} entries, but {len(unused)} pages are free")
        idle = sum(1 for page in self.cached_pages if self._refs[page] == 1)
        if idle != self._num_idle:
            raise CacheError(f"{self._num_idle} pages count as idle, but {idle} are")


class OpenPages:
    """Numbers of the open pages: one a running sequence, never shared."""

    def __init__(self, num_open: int) -> None:
        self.num_open = num_open
        self._free = list(range(num_open - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Open pages without a sequence."""
        return len(self._free)

    def allocate(self) -> int:
        """Take an open page.

        Raises
        ------
        CacheError
            If every open page has a sequence.
        """
        if not self._free:
            raise CacheError(f"all {self.num_open} sequences are running: remove one first")
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Give an open page back."""
        if slot in self._free:
            raise CacheError(f"open page {slot} is already free")
        self._free.append(slot)

    def check_integrity(self, held: list[int]) -> None:
        """Compare the free list with the open pages the sequences hold; raises CacheError."""
        if sorted(held + self._free) != list(range(self.num_open)):
            raise CacheError(
                f"{len(held)} open pages held and {len(self._free)} free do not make {self.num_open} distinct"
            )
