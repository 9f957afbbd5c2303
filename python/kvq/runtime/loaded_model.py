"""A loaded model: runs steps of prefill and decode over its own KV cache.

A call of the model costs tens of microseconds beside its kernels, so everything that can be is made
once: the weights are one array object, and ``step_tensors.py`` keeps the tensors of a step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import LibraryError
from kvq.layout import KVLayout
from kvq.runtime.cache_shape import CacheShape
from kvq.runtime.kv_cache import PagedKVCache, SequenceId
from kvq.runtime.library import Library, Params
from kvq.runtime.metadata import Metadata
from kvq.runtime.step_plan import StepPlan, build_step
from kvq.runtime.step_tensors import StepTensors, step_maker


class LoadedModel:
    """A library with its weights and a cache: runs steps of prefill and decode.

    Parameters
    ----------
    library : Library
    params : Params
    shape : CacheShape
        Pages to allocate.
    max_rows : int
        Most rows of a step: the prefill chunk.

    Attributes
    ----------
    cache : PagedKVCache
        The book-keeping; add, fork, pop and remove sequences here.
    faults : numpy.ndarray
        int64 ``[2]``: NaNs replaced and values saturated by all steps so far.
    """

    def __init__(self, library: Library, params: Params, shape: CacheShape, max_rows: int) -> None:
        self.library, self.params, self.shape = library, params, shape
        self.metadata = library.metadata
        self.max_rows = max(max_rows, shape.num_open)
        self.tensors = library.create_cache(shape)
        layout = self.metadata.layout
        self.cache = PagedKVCache(
            layout,
            shape.num_pages,
            shape.num_open,
            shape.num_workspace,
            self.tensors.copy_open,
            self.metadata.model.cache_window,
        )
        table = shape.num_open * max(1, layout.pages_for(self.metadata.context_window_size))
        meta = self.metadata
        self.plan = StepPlan(
            self.cache, self.max_rows, table, meta.split_pages, meta.split_slots, meta.tile_rows
        )
        self.faults = np.zeros(2, np.int64)
        self._steps = step_maker(self.plan, library.device, meta)
        kv = self.tensors
        self._tensors = (kv.pool, kv.open, kv.workspace, kv.scratch)

    @property
    def layout(self) -> KVLayout:
        """Layout of the cache."""
        return self.metadata.layout

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the cache's tensors by name, counted from the tensors."""
        return {**self.tensors.nbytes, "faults": self.plan.kv_faults.nbytes}

    def step(
        self, requests: list[tuple[SequenceId, int]], ids: Any, logit_rows: list[int] | None = None
    ) -> np.ndarray:
        """Append tokens to sequences and return logits.

        Parameters
        ----------
        requests : list of (sequence id, int)
            New tokens of each sequence.
        ids : sequence of int
            Token ids, all sequences' one after another.
        logit_rows : list of int, optional
            Rows whose logits are wanted; by default the last of each sequence.

        Returns
        -------
        numpy.ndarray
            float32 ``[number of logit rows, vocabulary]``.

        Raises
        ------
        CacheError
            If the cache cannot take the step; nothing changes.
        """
        plan = build_step(self.plan, requests, self.library.threads)
        try:
            if logit_rows is None and plan.num_rows == plan.num_sequences:
                logits = self.decode(ids, plan)
            else:
                if logit_rows is None:
                    logit_rows = (np.cumsum([count for _, count in requests]) - 1).tolist()
                logits = self.prefill(ids, logit_rows, plan)
        except BaseException:
            plan.abort()
            raise
        plan.commit()
        self.faults += self._steps.faults()
        return logits

    def prefill(self, ids: Any, logit_rows: list[int], plan: StepPlan) -> np.ndarray:
        """Run a planned step of any shape; float32 ``[len(logit_rows), vocabulary]``."""
        step = self._steps.prefill(ids, logit_rows)
        result = self.library.step_function("prefill", plan.num_rows)(
            step.ids, step.wanted, *self._arguments(step)
        )
        return self.library.host_array(result[0])[0]

    def decode(self, ids: Any, plan: StepPlan) -> np.ndarray:
        """Run a planned step of one row a sequence; float32 ``[sequences, vocabulary]``."""
        step = self._steps.decode(ids)
        result = self.library.step_function("decode", plan.num_rows)(step.ids, *self._arguments(step))
        return self.library.host_array(result[0])[:, 0]

    def _arguments(self, step: StepTensors) -> tuple[Any, ...]:
        """What ``prefill`` and ``decode`` take after the ids."""
        return (
            *self._tensors,
            step.faults,
            step.positions,
            step.slots,
            *step.lists,
            self.params.handle,
        )


def load_model(
    library_path: str | Path,
    weights_dir: str | Path,
    *,
    device: str = "cpu",
    context_window_size: int | None = None,
    max_batch_size: int = 1,
    prefill_chunk_size: int | None = None,
) -> LoadedModel:
    """Load a library and its weights, and allocate a cache.

    Parameters
    ----------
    library_path, weights_dir : str or Path
        What ``kvq compile`` and ``kvq convert_weight`` wrote.
    context_window_size, prefill_chunk_size : int, optional
        At most what the library was compiled for, which is the default.
    max_batch_size : int
        Sequences at once; the pool holds the whole context of each.

    Raises
    ------
    LibraryError
        If library, weights, machine or limits do not fit together.
    """
    library = Library.load(library_path, device)
    meta = library.metadata
    context, batch, chunk = checked_limits(
        meta,
        context_window_size=context_window_size,
        max_batch_size=max_batch_size,
        prefill_chunk_size=prefill_chunk_size,
    )
    chunk = min(chunk, context * batch)
    shape = CacheShape.for_limits(
        meta.layout, context_window_size=context, max_batch_size=batch, prefill_chunk_size=chunk
    )
    return LoadedModel(library, library.load_params(weights_dir), shape, chunk)


def checked_limits(
    metadata: Metadata,
    *,
    context_window_size: int | None = None,
    max_batch_size: int | None = None,
    prefill_chunk_size: int | None = None,
) -> tuple[int, int, int]:
    """Context, batch and chunk to run with: what is asked, within what the library was compiled for.

    Raises
    ------
    LibraryError
        If more is asked.
    """
    asked = {
        "context_window_size": context_window_size,
        "max_batch_size": max_batch_size,
        "prefill_chunk_size": prefill_chunk_size,
    }
    found = []
    for name, value in asked.items():
        limit = getattr(metadata, name)
        if value is not None and not 1 <= value <= limit:
            raise LibraryError(
                f"--{name.replace('_', '-')} {value} is outside 1 .. {limit}, "
                "which the library was compiled for"
            )
        found.append(limit if value is None else value)
    return found[0], found[1], found[2]
