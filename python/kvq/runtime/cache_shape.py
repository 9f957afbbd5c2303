"""How many pages a cache has, and the bytes that makes: the one sum that plan and allocation share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvq.config import ModelConfig
from kvq.errors import check_positive
from kvq.layout import KVLayout

#: Partial results of split rows that the attention's scratch holds, unless a library says otherwise.
SCRATCH_SLOTS = 256


def scratch_bytes(layout: KVLayout, num_query_heads: int, scratch_slots: int) -> int:
    """Bytes of ``attention_scratch``, float32 ``[slots, query heads, head_dim + 8]``."""
    return scratch_slots * num_query_heads * (layout.head_dim + 8) * 4


def logit_room(rows: int) -> int:
    """Rows of logits that a GPU computes where ``rows`` are wanted: powers of two, so that sizes repeat."""
    return 1 << (rows - 1).bit_length()


def logit_bytes(model: ModelConfig, rows: int) -> int:
    """Bytes of ``rows`` rows of logits of a prefill, and of what they are computed from."""
    return 4 * rows * (model.vocab_size + 2 * model.hidden_size)


def most_pages(page_size: int, window: int | None, tokens: int, rows: int) -> int:
    """Most sealed pages that a sequence lists while it grows to ``tokens``, by at most ``rows`` a step.

    Without a window, all that it fills. Otherwise it has, before a step, the pages that ``window`` tokens can
    lie in, and in the step those that it fills.
    """
    filled = tokens // page_size
    if window is None:
        return filled
    return min(filled, -(-(window - 1) // page_size) + rows // page_size + 1)


def unread_bytes(layout: KVLayout, windows: Sequence[int | None], tokens: int) -> int:
    """Bytes of a sequence's sealed pages that no layer reads, because its window is past them.

    A page holds the tokens of all layers; where every layer slides, such pages are released.

    Parameters
    ----------
    windows : sequence of int or None
        Of each layer; None: it sees every token.
    tokens : int
        Length of the sequence.
    """
    if None not in windows:
        return 0
    pages, size = layout.pages_for(tokens), layout.page_size
    unread = sum(max(0, pages - -(-(window - 1) // size)) for window in windows if window is not None)
    return unread * (layout.page_bytes // layout.num_layers)


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
        window: int | None = None,
    ) -> CacheShape:
        """Pages for ``max_batch_size`` sequences of ``context_window_size`` tokens, or ``num_pages``.

        With a ``window`` (``ModelConfig.cache_window``) a sequence releases what it leaves behind after each
        chunk. A tensor of no elements is no good to a kernel, so every number is at least one.
        """
        check_positive(
            context_window_size=context_window_size,
            max_batch_size=max_batch_size,
            prefill_chunk_size=prefill_chunk_size,
        )
        chunk = min(prefill_chunk_size, context_window_size * max_batch_size)
        if num_pages is None:
            pages = most_pages(layout.page_size, window, context_window_size, prefill_chunk_size)
            num_pages = pages * max_batch_size
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
