"""A loaded model: runs steps of prefill and decode over its own KV cache.

A call of the model costs tens of microseconds beside its kernels, so everything that can be is made
once: the weights are one array object, and ``step_tensors.py`` keeps the tensors of a step.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import LibraryError
from kvq.layout import KVLayout
from kvq.runtime.cache_shape import CacheShape
from kvq.runtime.cuda_driver import CudaDriver
from kvq.runtime.kv_cache import PagedKVCache, SequenceId
from kvq.runtime.library import Library, Params
from kvq.runtime.metadata import Metadata
from kvq.runtime.step_graphs import StepGraphs
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
            self.cache,
            self.max_rows,
            table,
            meta.split_pages,
            meta.split_slots,
            meta.tile_rows,
            longest_first=library.device.kind != "cpu",
        )
        self.faults = np.zeros(2, np.int64)
        self._driver = CudaDriver() if library.device.kind == "cuda" else None
        self._graphs = StepGraphs(self._driver) if self._driver else None
        self._ids = self._driver.pinned_zeros(self.max_rows) if self._driver else None
        self._steps = step_maker(self.plan, library.device, meta, self._driver)
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

    @property
    def finds_likeliest(self) -> bool:
        """Whether the device finds the likeliest tokens, so that logits need not leave it."""
        return self.library.likeliest is not None

    def step(
        self,
        requests: list[tuple[SequenceId, int]],
        ids: Any,
        logit_rows: list[int] | None = None,
        likeliest: bool = False,
    ) -> np.ndarray:
        """Append tokens to sequences and return logits, or the likeliest tokens.

        Parameters
        ----------
        requests : list of (sequence id, int)
            New tokens of each sequence.
        ids : sequence of int
            Token ids, all sequences' one after another.
        logit_rows : list of int, optional
            Rows whose logits are wanted; by default the last of each sequence.
        likeliest : bool
            Whether the likeliest tokens are wanted, not the logits.

        Returns
        -------
        numpy.ndarray
            float32 ``[number of logit rows, vocabulary]``; or int32 ``[number of logit rows]``, -1 where a
            logit is not finite.

        Raises
        ------
        CacheError
            If the cache cannot take the step; nothing changes.
        """
        plan = build_step(self.plan, requests, self.library.threads)
        try:
            with self._driver.current(self.library.device.handle) if self._driver else nullcontext():
                if logit_rows is None and plan.num_rows == plan.num_sequences:
                    results = self._decode(ids, plan)
                else:
                    if logit_rows is None:
                        logit_rows = (np.cumsum([count for _, count in requests]) - 1).tolist()
                    results = self._prefill(ids, logit_rows, plan)
                found = self._likeliest(*results) if likeliest else self._logits(results[0])
        except BaseException:
            plan.abort()
            raise
        plan.commit()
        self.faults += self._steps.faults()
        return found

    def _prefill(self, ids: Any, logit_rows: list[int], plan: StepPlan) -> tuple[Any, Any]:
        """Run a planned step of any shape: its logits ``[1, len(logit_rows), V]`` and likeliest tokens."""
        if self._graphs:
            self._graphs.make_room(self._most_bytes(plan.num_rows, len(logit_rows)))
        step = self._steps.prefill(ids, logit_rows)
        function = self.library.step_function("prefill", plan.num_rows)
        logits = function(step.ids, step.wanted, *self._arguments(step))[0]
        return logits, self._find(logits)

    def _decode(self, ids: Any, plan: StepPlan) -> tuple[Any, Any]:
        """Run a planned step of one row a sequence: its logits ``[sequences, 1, V]`` and likeliest tokens."""
        step = self._steps.decode(ids)
        function = self.library.step_function("decode", plan.num_rows)

        if self._graphs and step.key not in self._graphs:
            self._graphs.make_room(self._most_bytes(plan.num_rows, plan.num_rows))

        def run() -> tuple[Any, Any]:
            logits = function(step.ids, *self._arguments(step))[0]
            return logits, self._find(logits)

        return self._graphs.run(step.key, run) if self._graphs else run()

    def _most_bytes(self, rows: int, logit_rows: int) -> int:
        """More than a step allocates between its kernels: every kind of row twice, in float32."""
        model = self.metadata.model
        heads = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
        width = 4 * model.hidden_size + 3 * model.intermediate_size + 2 * heads
        return 8 * (rows * width + logit_rows * model.vocab_size)

    def _find(self, logits: Any) -> Any:
        """The likeliest tokens of the rows, on the device; None where the host looks itself."""
        if self.library.likeliest is None:
            return None
        rows, width = logits.shape[0] * logits.shape[1], logits.shape[2]
        return self.library.likeliest(logits._create_view((rows, 1, width)))

    def _logits(self, logits: Any) -> np.ndarray:
        """The rows of logits on the host."""
        return self.library.host_array(logits).reshape(-1, logits.shape[2])

    def _likeliest(self, logits: Any, found: Any) -> np.ndarray:
        """The likeliest tokens on the host."""
        if found is None or self._driver is None or self._ids is None:
            rows = self._logits(logits)
            return np.where(np.isfinite(rows).all(axis=1), rows.argmax(axis=1), -1).astype(np.int32)
        count = found.shape[0]
        self._driver.copy_to_host(self._ids[:count], found.data_ptr())
        self._steps.fetch_faults()
        self._driver.synchronize()
        return self._ids[:count].copy()

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
