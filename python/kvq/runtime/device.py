"""Devices a library runs on: finding them, and loading what TVM needs for them."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi

from kvq.cpu_features import usable_cores
from kvq.errors import LibraryError
from kvq.runtime import vulkan

#: Devices that ``--device`` knows.
DEVICES = ("cpu", "cuda", "vulkan")

#: Bytes of a piece of memory, as CUDA gives it.
_PIECE = 2 << 20
_CUDA_API = "device_api.cuda"
_CUDART = "libcudart.so.13"


@dataclass(frozen=True)
class Device:
    """A device that is there.

    Attributes
    ----------
    kind : str
        One of :data:`DEVICES`.
    handle : tvm.runtime.Device
    """

    kind: str
    handle: Any

    @staticmethod
    def kind_of(name: str) -> str:
        """What ``--device`` compiles for: the name without a number."""
        return name.partition(":")[0]

    @classmethod
    def open(cls, name: str) -> Device:
        """The device of ``--device``.

        Raises
        ------
        LibraryError
            If the name is unknown, or there is no such device here.
        """
        if name == "cpu":
            # Read once, when TVM starts its threads. Its own guess takes half of a virtual machine's cores,
            # and threads bound to cores wait for whatever else runs there: steps then take twice as long.
            os.environ.setdefault("TVM_NUM_THREADS", str(usable_cores()))
            os.environ.setdefault("TVM_BIND_THREADS", "0")
            return cls(name, tvm.cpu())
        if cls.kind_of(name) == "vulkan":
            return cls("vulkan", tvm.device("vulkan", vulkan.find_device(name)))
        if name != "cuda":
            raise LibraryError(f"device {name!r} is not supported: use {', '.join(DEVICES)} or vulkan:1")
        load_cuda_runtime()
        handle = tvm.cuda(0)
        if not handle.exist:
            raise LibraryError("device 'cuda' cannot be used: the driver finds no GPU")
        return cls(name, handle)

    @property
    def threads(self) -> int:
        """Tasks that run side by side: threads of the CPU, multiprocessors of a GPU."""
        if self.kind == "cpu":
            return int(tvm_ffi.get_global_func("runtime.NumThreads")())
        return int(self.handle.multi_processor_count)

    @property
    def largest_tensor(self) -> int | None:
        """Bytes of the largest tensor that kernels can be given; None where memory is the only limit."""
        return vulkan.largest_tensor(self.handle.index) if self.kind == "vulkan" else None

    def check_library(self, module: Any, path: str) -> None:
        """Refuse a library whose kernels the device cannot run.

        Raises
        ------
        LibraryError
            Naming the limit.
        """
        if self.kind == "vulkan":
            vulkan.check_library(module, self.handle.index, path)

    def allocated(self, size: int) -> int:
        """Bytes that an allocation of ``size`` bytes takes: CUDA gives large ones in whole pieces."""
        if self.kind != "cuda" or size < _PIECE // 2:
            return size
        return -(-size // _PIECE) * _PIECE

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it."""
        self.handle.sync()


def load_cuda_runtime() -> None:
    """Load TVM's CUDA runtime, which ``import tvm`` leaves out where TVM comes without its compiler.

    Raises
    ------
    LibraryError
        If it, or what it needs, cannot be loaded.
    """
    if tvm_ffi.get_global_func(_CUDA_API, allow_missing=True) is not None:
        return
    sidecar = Path(tvm.__file__).parent / "lib" / "libtvm_runtime_cuda.so"
    problem: OSError | None = None
    for cudart in (None, *_cudart_candidates()):
        try:
            if cudart is not None:
                ctypes.CDLL(str(cudart), ctypes.RTLD_GLOBAL)
            ctypes.CDLL(str(sidecar))
            return
        except OSError as error:
            problem = error
    raise LibraryError(f"device 'cuda' cannot be used: {problem}: CUDA 13 and its driver are needed")


def _cudart_candidates() -> list[Path]:
    """Where CUDA's runtime library may lie off the loader's path: a toolkit, or NVIDIA's wheels."""
    homes = [Path(home) for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    directories = [home / name for home in homes for name in ("lib64", "lib")]
    package = importlib.util.find_spec("nvidia")
    for root in (package.submodule_search_locations or []) if package else []:
        directories += sorted(Path(root).glob("cu*/lib"), reverse=True)
    return [directory / _CUDART for directory in directories if (directory / _CUDART).is_file()]
