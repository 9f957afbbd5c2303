"""Stands in for the CUDA driver where steps are made without a GPU."""

from __future__ import annotations

import ctypes

import numpy as np


class HostMemory:
    """``CudaDriver`` whose device is the host's memory: copies are done at once."""

    def pinned_zeros(self, count: int) -> np.ndarray:
        """int32 ``[count]``."""
        return np.zeros(count, np.int32)

    def copy_to_device(self, target: int, source: np.ndarray) -> None:
        """Copy to an address."""
        ctypes.memmove(target, source.ctypes.data, source.nbytes)

    def copy_to_host(self, target: np.ndarray, source: int) -> None:
        """Copy from an address."""
        ctypes.memmove(target.ctypes.data, source, target.nbytes)

    def synchronize(self) -> None:
        """Nothing is under way."""
