"""CUDA graphs and events, for timing: the host's calls must not be in the figures."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from kvq.runtime.cuda_driver import CudaDriver


class Driver(CudaDriver):
    """The driver with a stream of its own, and what a measurement needs beside."""

    def __init__(self) -> None:
        super().__init__(blocking=False)

    def time_replays(
        self, device: Any, launch: Callable[[], None], rounds: int, together: int = 1
    ) -> list[float]:
        """Seconds of what ``launch`` puts on TVM's stream of ``device``, replayed as a graph.

        One figure a round, of ``together`` replays one behind the other: only the first waits for the host.
        """

        def work() -> None:
            with self.current(device):
                launch()

        work()
        self.synchronize()
        executable = self.capture(work)

        def replay() -> None:
            for _ in range(together):
                self.launch(executable)

        try:
            return [seconds / together for seconds in self.time(replay, rounds)]
        finally:
            self.free_graph(executable)

    def time(self, launch: Callable[[], None], rounds: int) -> list[float]:
        """Seconds that the stream takes for what ``launch`` puts on it, ``rounds`` times after three."""
        start, end = ctypes.c_void_p(), ctypes.c_void_p()
        for event in (start, end):
            self.call("cuEventCreate", ctypes.byref(event), 0)
        seconds = []
        for i in range(rounds + 3):
            self.call("cuEventRecord", start, self.stream)
            launch()
            self.call("cuEventRecord", end, self.stream)
            self.call("cuEventSynchronize", end)
            elapsed = ctypes.c_float()
            self.call("cuEventElapsedTime", ctypes.byref(elapsed), start, end)
            if i >= 3:
                seconds.append(elapsed.value / 1e3)
        for event in (start, end):
            self.call("cuEventDestroy_v2", event)
        return seconds

    def copy_rate(self, num_bytes: int = 4 << 30) -> float:
        """Bytes a second of a copy within the device's memory, read and written: the roofline."""
        buffers = [ctypes.c_uint64() for _ in range(2)]
        size = ctypes.c_size_t(num_bytes)
        for buffer in buffers:
            self.call("cuMemAlloc_v2", ctypes.byref(buffer), size)
        copy = partial(self.call, "cuMemcpyDtoDAsync_v2", buffers[1], buffers[0], size, self.stream)
        try:
            self.call("cuMemsetD8_v2", buffers[0], ctypes.c_uint8(90), size)
            return 2 * num_bytes / statistics.median(self.time(copy, 10))
        finally:
            for buffer in buffers:
                self.call("cuMemFree_v2", buffer)
