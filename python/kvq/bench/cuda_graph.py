"""CUDA graphs and events through the driver, for timing: the host's calls must not be in the figures."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from kvq.errors import LibraryError

_CAPTURE_THREAD_LOCAL = 1


class Driver:
    """The few driver functions that a measurement needs, in the context of device 0 that TVM uses, too.

    Raises
    ------
    LibraryError
        If there is no CUDA driver; from every method, if the driver reports an error.
    """

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise LibraryError(f"no CUDA driver: {error}") from None
        context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)
        self.stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(self.stream), 1)

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._cuda, name)(*args)
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            raise LibraryError(f"{name} failed: {(text.value or b'unknown error').decode()}")

    def synchronize(self) -> None:
        """Wait for the stream."""
        self._call("cuStreamSynchronize", self.stream)

    def capture(self, work: Callable[[], None]) -> ctypes.c_void_p:
        """Record what ``work`` launches on the stream as a graph that can be launched."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamBeginCapture_v2", self.stream, _CAPTURE_THREAD_LOCAL)
        try:
            work()
        finally:
            self._call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_uint64(0))
        self._call("cuGraphDestroy", graph)
        return executable

    def time_graph(self, executable: ctypes.c_void_p, rounds: int) -> list[float]:
        """Seconds of each of ``rounds`` launches, after three that do not count; the graph is freed."""
        launch = partial(self._call, "cuGraphLaunch", executable, self.stream)
        try:
            return self.time(launch, rounds)
        finally:
            self._call("cuGraphExecDestroy", executable)

    def time(self, launch: Callable[[], None], rounds: int) -> list[float]:
        """Seconds that the stream takes for what ``launch`` puts on it, ``rounds`` times after three."""
        start, end = ctypes.c_void_p(), ctypes.c_void_p()
        for event in (start, end):
            self._call("cuEventCreate", ctypes.byref(event), 0)
        seconds = []
        for i in range(rounds + 3):
            self._call("cuEventRecord", start, self.stream)
            launch()
            self._call("cuEventRecord", end, self.stream)
            self._call("cuEventSynchronize", end)
            elapsed = ctypes.c_float()
            self._call("cuEventElapsedTime", ctypes.byref(elapsed), start, end)
            if i >= 3:
                seconds.append(elapsed.value / 1e3)
        for event in (start, end):
            self._call("cuEventDestroy_v2", event)
        return seconds

    def copy_rate(self, num_bytes: int = 4 << 30) -> float:
        """Bytes a second of a copy within the device's memory, read and written: the roofline."""
        buffers = [ctypes.c_uint64() for _ in range(2)]
        size = ctypes.c_size_t(num_bytes)
        for buffer in buffers:
            self._call("cuMemAlloc_v2", ctypes.byref(buffer), size)
        copy = partial(self._call, "cuMemcpyDtoDAsync_v2", buffers[1], buffers[0], size, self.stream)
        try:
            self._call("cuMemsetD8_v2", buffers[0], ctypes.c_uint8(90), size)
            return 2 * num_bytes / statistics.median(self.time(copy, 10))
        finally:
            for buffer in buffers:
                self._call("cuMemFree_v2", buffer)
