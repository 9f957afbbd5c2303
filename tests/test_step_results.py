"""Results of a step that stand on a device: which rows reach the host, and in what memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from kvq.runtime.step_results import CudaFetcher, Results


class FakeDriver:
    """Stands in for ``CudaDriver``: copies are done when the stream is waited for."""

    def __init__(self) -> None:
        self.pinned: list[int] = []
        self.waiting: list[tuple[int, int, int]] = []

    def pinned_zeros(self, count: int) -> np.ndarray:
        self.pinned.append(count)
        return np.zeros(count, np.int32)

    def copy_to_host(self, target: np.ndarray, source: int, pinned: bool = True) -> None:
        self.waiting.append((target.ctypes.data, source, target.nbytes))

    def synchronize(self) -> None:
        for copy in self.waiting:
            ctypes.memmove(*copy)
        self.waiting.clear()


@pytest.mark.parametrize("wanted", [[], [0], [1, 4], [0, 1, 2, 3, 4], [3]])
def test_tokens_and_the_logits_that_are_wanted(wanted: list[int]) -> None:
    driver, beside = FakeDriver(), []
    fetcher = CudaFetcher(driver, 8, lambda: beside.append(len(driver.waiting)))  # type: ignore[arg-type]
    logits = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)  # room for 8 rows, of which 5 count
    drawn = np.arange(10, 18, dtype=np.int32)
    results = Results(logits.ctypes.data, drawn.ctypes.data, 6)
    tokens, found = fetcher.fetch(results, 5, wanted)
    np.testing.assert_array_equal(tokens, drawn[:5])
    np.testing.assert_array_equal(found, logits[wanted].reshape(len(wanted), 6))
    assert beside == [1], "what comes beside is on its way before anything is waited for"


def test_memory_for_logits_is_kept() -> None:
    driver: Any = FakeDriver()
    fetcher = CudaFetcher(driver, 8, lambda: None)
    logits = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)
    for wanted in ([1], [2, 0, 4], [3], [5, 6]):
        _, found = fetcher.fetch(Results(logits.ctypes.data, None, 6), 7, wanted)
        np.testing.assert_array_equal(found, logits[wanted])
    assert driver.pinned == [8, 6, 24], "of the tokens, of one row, of four"
