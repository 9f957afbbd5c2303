"""How many pages a cache has, and the bytes that makes: the one sum that plan and allocation share."""

from __future__ import annotations

from dataclasses import dataclass

from kvq.errors import check_positive
from kvq.layout import KVLayout

#: Partial results of split rows that the attention's scratch holds, unless a library says otherwise.
SCRATCH_SLOTS = 256


def scratch_bytes(layout: KVLayout, num_query_heads: int, scratch_slots: int) -> int:
    """Bytes of ``attention_scratch``, float32 ``[slots, query heads, head_dim + 8]``."""
    return scratch_slots * num_query_heads * (layout.head_dim + 8) * 4


def most_pages(page_size: int, window: int | None, tokens: int, rows: int) -> int:
    """Most sealed pages that a sequence lists while it grows to ``tokens``, by at most ``rows`` a step.

    Without a window, all that it fills. Otherwise it has, before a step, the pages that ``window`` tokens can
    lie in, and in the step those that it fills.
    """
    filled = tokens // page_size
    if window is None:
        return filled
    return min(filled, -(-(window - 1) // page_size) + rows // page_size + 1)


@dataclass(frozen=True)
class CacheShape:
    """Numbers of pages.

    Attributes
    ----------
    num_pages : int
        Sealed pages in the pool.
    num_open : int
        Open pages: sequences that run at once.
    num_workspace : int
        Row pages of a step's workspace.
    """

    num_pages: int
    num_open: int
    num_workspace: int

    @classmethod
    def for_limits(
        cls,
        layout: KVLayout,
        *,
        context_window_size: int,
        max_batch_size: int = 1,
        prefill_chunk_size: int = 2048,
        num_pages: int | None = None,
    ) -> CacheShape:
        """Pages for ``max_batch_size`` sequences of ``context_window_size`` tokens, or ``num_pages``.

        A tensor of no elements is no good to a kernel, so every number is at least one.
        """
        check_positive(
            context_window_size=context_window_size,
            max_batch_size=max_batch_size,
            prefill_chunk_size=prefill_chunk_size,
        )
        chunk = min(prefill_chunk_size, context_window_size * max_batch_size)
        if num_pages is None:
            num_pages = layout.pages_for(context_window_size) * max_batch_size
        return cls(max(1, num_pages), max_batch_size, max(1, layout.workspace_pages_for(chunk)))

    def sealed_bytes(self, layout: KVLayout) -> int:
        """Bytes of the pool of sealed pages."""
        return self.num_pages * layout.page_bytes

    def open_bytes(self, layout: KVLayout) -> int:
        """Bytes of the open pages."""
        return self.num_open * layout.open_page_bytes

    def workspace_bytes(self, layout: KVLayout) -> int:
        """Bytes of the workspace's row pages."""
        return self.num_workspace * layout.workspace_page_bytes
