"""A stream, graphs and pinned memory through the CUDA driver, in the context that TVM uses, too."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tvm_ffi

from kvq.errors import LibraryError

_CAPTURE_THREAD_LOCAL = 1
#: Flag of a stream that waits for the default stream and the default stream for it: TVM copies there.
_BLOCKING, _NON_BLOCKING = 0, 1


class CudaDriver:
    """The driver in the context of device 0.

    Parameters
    ----------
    blocking : bool
        Whether the stream keeps in step with the default stream.

    Raises
    ------
    LibraryError
        If there is no CUDA driver; from every method, if the driver reports an error.
    """

    def __init__(self, blocking: bool = True) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
            self._short = ctypes.PyDLL("libcuda.so.1")
        except OSError as error:
            raise LibraryError(f"no CUDA driver: {error}") from None
        self._context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)
        self.call("cuCtxSetCurrent", self._context)
        self.stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(self.stream), _BLOCKING if blocking else _NON_BLOCKING)

    def call(self, name: str, *args: Any) -> None:
        """Call a function of the driver, which may take its time: other threads of Python run meanwhile."""
        self._check(name, getattr(self._cuda, name)(*args))

    def call_short(self, name: str, *args: Any) -> None:
        """Call a function that only puts something on the stream.

        Python's lock is kept: to give it up for a microsecond means to wait until another thread, a server's
        for example, gives it back.
        """
        self._check(name, getattr(self._short, name)(*args))

    def _check(self, name: str, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            raise LibraryError(f"{name} failed: {(text.value or b'unknown error').decode()}")

    @contextmanager
    def current(self, device: Any) -> Iterator[None]:
        """Make context and stream those of this thread, also of TVM's calls on ``device``."""
        self.call_short("cuCtxSetCurrent", self._context)
        with tvm_ffi.use_raw_stream(device, self.stream.value or 0):
            yield

    def synchronize(self) -> None:
        """Wait for the stream."""
        self.call("cuStreamSynchronize", self.stream)

    def capture(self, work: Callable[[], None]) -> ctypes.c_void_p:
        """Record what ``work`` launches on the stream as a graph that can be launched."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuStreamBeginCapture_v2", self.stream, _CAPTURE_THREAD_LOCAL)
        try:
            work()
        finally:
            self.call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        self.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_uint64(0))
        self.call("cuGraphDestroy", graph)
        return executable

    def launch(self, executable: ctypes.c_void_p) -> None:
        """Put a graph on the stream."""
        self.call_short("cuGraphLaunch", executable, self.stream)

    def free_graph(self, executable: ctypes.c_void_p) -> None:
        """Free what :meth:`capture` made."""
        self.call("cuGraphExecDestroy", executable)

    def pinned_zeros(self, count: int) -> np.ndarray:
        """int32 ``[count]`` in memory that the device copies from and to without the host's help.

        The memory lives as long as the process.
        """
        pointer = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(4 * count), 0)
        assert pointer.value is not None
        array = np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(pointer.value))
        array[:] = 0
        return array

    def copy_to_device(self, target: int, source: np.ndarray) -> None:
        """Put a copy of a pinned array to the device's address ``target`` on the stream."""
        host, size = ctypes.c_void_p(_address(source)), ctypes.c_size_t(source.nbytes)
        self.call_short("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(target), host, size, self.stream)

    def copy_to_host(self, target: np.ndarray, source: int, pinned: bool = True) -> None:
        """Put a copy from the device's address ``source`` on the stream; waits for it if not ``pinned``."""
        host, size = ctypes.c_void_p(_address(target)), ctypes.c_size_t(target.nbytes)
        call = self.call_short if pinned else self.call
        call("cuMemcpyDtoHAsync_v2", host, ctypes.c_uint64(source), size, self.stream)

    def memory(self) -> tuple[int, int]:
        """Bytes of the device that are free, and all of them."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
