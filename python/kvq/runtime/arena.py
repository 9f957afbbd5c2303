"""One block of memory for all weights, on huge pages where the system has them.

A step reads every weight once. On pages of 4 KiB that is thousands of translations a step, and the
processor's own prefetching stops at each page's end.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import tvm_ffi

_ALIGNMENT = 64


class Arena:
    """Memory that tensors are copied into one after another.

    Parameters
    ----------
    sizes : list of int
        Bytes of each tensor that will come, in order.
    """

    def __init__(self, sizes: list[int]) -> None:
        total = sum(_aligned(size) for size in sizes)
        self._memory = mmap.mmap(-1, max(total, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._used = 0

    def place(self, tensor: Any) -> Any:
        """Copy a CPU tensor to the next free place and return the copy, which keeps the arena alive."""
        source = np.from_dlpack(tensor)
        size = math.prod(source.shape) * source.dtype.itemsize
        view = self._bytes[self._used : self._used + size].view(source.dtype).reshape(source.shape)
        view[...] = source
        self._used += _aligned(size)
        return tvm_ffi.from_dlpack(view)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
