"""What a step leaves on the device, and how the host gets it: drawn tokens, logits of some rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvq.runtime.cuda_driver import CudaDriver
from kvq.runtime.library import Library


class Results(NamedTuple):
    """The results of a step.

    Attributes
    ----------
    logits : tensor or int
        float32 ``[rows, width]``, or its address on the device.
    tokens : tensor, int or None
        int32 ``[rows]``, or its address; None where the device draws none.
    width : int
        Logits of a row.
    """

    logits: Any
    tokens: Any
    width: int


class Fetcher(Protocol):
    """Brings results to the host."""

    def keep(self, logits: Any, tokens: Any) -> Results:
        """The results of a step whose tensors are these, to be fetched before another step runs."""
        ...

    def fetch(self, results: Results, rows: int, wanted: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the first ``rows`` rows (none where the device drew none), and logits of those wanted."""
        ...


class TensorFetcher:
    """Where TVM copies, and the CPU, where nothing need be copied."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def keep(self, logits: Any, tokens: Any) -> Results:
        """The tensors themselves."""
        return Results(logits, tokens, logits.shape[-1])

    def fetch(self, results: Results, rows: int, wanted: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and logits; on the CPU all logits are a view."""
        host = self._library.host_array
        tokens = np.empty(0, np.int32) if results.tokens is None else host(results.tokens)[:rows]
        if not wanted:
            return tokens, np.empty((0, results.width), np.float32)
        logits = host(results.logits).reshape(-1, results.width)
        return tokens, logits[:rows] if len(wanted) == rows else logits[list(wanted)]


class CudaFetcher:
    """Copies on the stream that the step ran on, and waits once.

    Parameters
    ----------
    driver : CudaDriver
    most_rows : int
        Most rows of logits of a step.
    beside : callable
        Puts further copies on the stream that the host wants at that time.
    """

    def __init__(self, driver: CudaDriver, most_rows: int, beside: Callable[[], None]) -> None:
        self._driver, self._beside = driver, beside
        self._tokens = driver.pinned_zeros(most_rows)
        self._logits = np.empty((0, 0), np.float32)

    def keep(self, logits: Any, tokens: Any) -> Results:
        """Addresses alone: the memory is the pool's again, and nothing takes it before it was fetched.

        So a graph, which keeps its results as long as it lives, holds no memory.
        """
        return Results(logits.data_ptr(), None if tokens is None else tokens.data_ptr(), logits.shape[-1])

    def fetch(self, results: Results, rows: int, wanted: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and logits, copies of what is on the device; logits of some rows until the next time."""
        driver, row_bytes = self._driver, 4 * results.width
        if results.tokens is not None:
            driver.copy_to_host(self._tokens[:rows], results.tokens)
        self._beside()
        if len(wanted) == rows:
            logits = np.empty((rows, results.width), np.float32)
            driver.copy_to_host(logits, results.logits, pinned=False)
        else:
            logits = self._room(len(wanted), results.width)
            for at, row in enumerate(wanted):
                driver.copy_to_host(logits[at], results.logits + row * row_bytes)
        driver.synchronize()
        return self._tokens[: rows if results.tokens is not None else 0].copy(), logits

    def _room(self, rows: int, width: int) -> np.ndarray:
        """Pinned memory for logits of a few rows: twice as much as ever before where it does not suffice."""
        if not rows:
            return np.empty((0, width), np.float32)
        if rows > len(self._logits):
            room = 1 << (rows - 1).bit_length()
            self._logits = self._driver.pinned_zeros(room * width).view(np.float32).reshape(room, width)
        return self._logits[:rows]
