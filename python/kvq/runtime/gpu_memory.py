"""What the driver counts of a GPU's memory, asked without a context of CUDA: a context takes some itself."""

from __future__ import annotations

import ctypes
from typing import Any

from kvq.errors import LibraryError

#: Bytes that a process may yet take beside what is planned: code that is loaded when it first runs, graphs,
#: and whole pieces of memory where less was asked for.
HEADROOM = 96 << 20
#: Processes on a GPU that are listed.
_MOST_PROCESSES = 256


class _Memory(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class GpuMemory:
    """The memory of the GPU that is CUDA's device 0.

    Raises
    ------
    LibraryError
        If driver or NVML, which comes with it, are missing; from every method, if NVML reports an error.
    """

    def __init__(self) -> None:
        try:
            cuda, self._nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise LibraryError(f"no CUDA driver: {error}") from None
        device, bus = ctypes.c_int(), ctypes.create_string_buffer(32)
        if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
            raise LibraryError("device 'cuda' cannot be used: the driver finds no GPU")
        cuda.cuDeviceGetPCIBusId(bus, len(bus), device)
        self._handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByPciBusId_v2", bus, ctypes.byref(self._handle))

    def _call(self, name: str, *args: Any) -> None:
        if status := getattr(self._nvml, name)(*args):
            raise LibraryError(f"the GPU's memory is unknown: {name} failed with {status}")

    def _read(self) -> _Memory:
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self._handle, ctypes.byref(memory))
        return memory

    @property
    def free(self) -> int:
        """Bytes that nobody has taken."""
        return int(self._read().free)

    @property
    def used(self) -> int:
        """Bytes that all processes have taken, and the driver for itself."""
        return int(self._read().used)

    def used_by(self, pid: int) -> int:
        """Bytes that a process has taken, its context and code among them; 0 if it has none."""
        count = ctypes.c_uint(_MOST_PROCESSES)
        found = (_Process * _MOST_PROCESSES)()
        self._call("nvmlDeviceGetComputeRunningProcesses_v3", self._handle, ctypes.byref(count), found)
        return next((int(one.used) for one in found[: count.value] if one.pid == pid), 0)

    def overhead(self, before: int) -> int:
        """Bytes that this process takes beside its tensors; ``before`` was in use when it had none of it."""
        return max(0, self.used - before) + HEADROOM
