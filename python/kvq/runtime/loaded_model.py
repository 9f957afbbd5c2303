"""A loaded model: runs steps of prefill and decode over its own KV cache.

A call of the model costs tens of microseconds beside its kernels, so everything that can be is made
once: the weights are one array object, and ``step_tensors.py`` keeps the tensors of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import LibraryError
from kvq.layout import KVLayout
from kvq.runtime.cache_shape import CacheShape, logit_bytes
from kvq.runtime.cuda_driver import CudaDriver
from kvq.runtime.kv_cache import PagedKVCache, SequenceId
from kvq.runtime.library import Library, Params
from kvq.runtime.metadata import DRAW, Metadata
from kvq.runtime.sampler import DRAW_FIELDS, SamplingParams
from kvq.runtime.step_graphs import StepGraphs
from kvq.runtime.step_plan import StepPlan, build_step
from kvq.runtime.step_results import CudaFetcher, Fetcher, Results, TensorFetcher
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
            on_gpu=library.device.kind != "cpu",
        )
        self.faults = np.zeros(2, np.int64)
        self._driver = CudaDriver() if library.device.kind == "cuda" else None
        self._graphs = StepGraphs(self._driver) if self._driver else None
        self._known: set[Any] = set()
        self._steps = step_maker(self.plan, library.device, meta, self._driver)
        self._fetcher: Fetcher = TensorFetcher(library)
        if self._driver:
            self._fetcher = CudaFetcher(self._driver, self.max_rows, self._steps.fetch_faults)
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

    def can_draw(self, params: SamplingParams) -> bool:
        """Whether the device draws such tokens, so that logits need not leave it."""
        if self.library.draw is None or params.changes_logits:
            return False
        return params.is_greedy or self.metadata.token_function == DRAW

    def step(
        self,
        requests: list[tuple[SequenceId, int]],
        ids: Any,
        logit_rows: list[int] | None = None,
        *,
        meanwhile: Callable[[], None] | None = None,
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
        meanwhile : callable, optional
            Called once while the device computes; before that where computing takes this thread.

        Returns
        -------
        numpy.ndarray
            float32 ``[number of logit rows, vocabulary]``.

        Raises
        ------
        CacheError
            If the cache cannot take the step; nothing changes.
        """
        return self._step(requests, ids, logit_rows, meanwhile=meanwhile)[1]

    def draw(
        self,
        requests: list[tuple[SequenceId, int]],
        ids: Any,
        draws: np.ndarray,
        logit_rows: list[int] | None = None,
        hosted: Sequence[int] = (),
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Append tokens to sequences, as :meth:`step` does, and draw the next ones on the device.

        Parameters
        ----------
        draws : numpy.ndarray
            int32 ``[number of logit rows, DRAW_FIELDS]``: how, as :meth:`can_draw` allows.
        hosted : sequence of int
            Which of the rows are wanted as logits, too.

        Returns
        -------
        tokens : numpy.ndarray
            int32 ``[number of logit rows]``, -1 where a logit is not finite.
        logits : numpy.ndarray
            float32 ``[len(hosted), vocabulary]``, good until the next step.
        """
        return self._step(requests, ids, logit_rows, draws, hosted, meanwhile)

    def likeliest(self, requests: list[tuple[SequenceId, int]], ids: Any) -> np.ndarray:
        """Append tokens, and find the likeliest next one of each sequence: int32, on the device if it can."""
        if self.library.draw is not None:
            return self.draw(requests, ids, np.zeros((len(requests), DRAW_FIELDS), np.int32))[0]
        return self.step(requests, ids).argmax(axis=1).astype(np.int32)

    def _step(
        self,
        requests: list[tuple[SequenceId, int]],
        ids: Any,
        logit_rows: list[int] | None,
        draws: np.ndarray | None = None,
        hosted: Sequence[int] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and logits of the ``hosted`` rows (by default of all that are wanted)."""
        decodes = logit_rows is None and max(count for _, count in requests) == 1
        cut = not (decodes and self._steps.cuts_decode)
        plan = build_step(self.plan, requests, self.library.threads, cut_attention=cut)
        try:
            if meanwhile is not None and self._driver is None:
                meanwhile()
            with self._driver.current(self.library.device.handle) if self._driver else nullcontext():
                if decodes:
                    wanted, results = plan.num_rows, self._decode(ids, draws, plan)
                else:
                    if logit_rows is None:
                        logit_rows = (np.cumsum([count for _, count in requests]) - 1).tolist()
                    wanted, results = len(logit_rows), self._prefill(ids, logit_rows, draws, plan)
                if self._driver is not None:
                    if meanwhile is not None:
                        meanwhile()
                    self._steps.expect_next()
                found = self._fetcher.fetch(results, wanted, range(wanted) if hosted is None else hosted)
        except BaseException:
            plan.abort()
            raise
        plan.commit()
        self.faults += self._steps.faults()
        return found

    def _prefill(self, ids: Any, logit_rows: list[int], draws: np.ndarray | None, plan: StepPlan) -> Results:
        """Run a planned step of any shape."""
        step = self._steps.prefill(ids, logit_rows, draws)
        function = self.library.step_function("prefill", plan.num_rows)
        self._make_room(function, step.wanted.shape[0])
        return self._results(function(step.ids, step.wanted, *self._arguments(step))[0], step)

    def _decode(self, ids: Any, draws: np.ndarray | None, plan: StepPlan) -> Results:
        """Run a planned step of one row a sequence."""
        step = self._steps.decode(ids, draws)
        function = self.library.step_function("decode", step.ids.shape[0])

        def run() -> Results:
            return self._results(function(step.ids, *self._arguments(step))[0], step)

        if self._graphs is None:
            return run()
        self._make_room(function)
        return self._graphs.run(step.key, run)

    def _make_room(self, function: Any, logit_rows: int = 0) -> None:
        """See that no graph is left when the first step of a kind takes memory that the device has not."""
        kind = (function, logit_rows)
        if self._graphs is None or kind in self._known:
            return
        most = self.metadata.step_bytes + logit_bytes(self.metadata.model, logit_rows)
        if self._graphs.make_room(most):
            self._known.clear()
        self._known.add(kind)

    def _results(self, logits: Any, step: StepTensors) -> Results:
        """The results of a step that ran, with the tokens that the device draws."""
        rows, width = logits.shape[0] * logits.shape[1], logits.shape[2]
        tokens = None
        if self.library.draw is not None:
            tokens = self.library.draw(logits._create_view((rows, 1, width)), step.draws)
        return self._fetcher.keep(logits, tokens)

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
