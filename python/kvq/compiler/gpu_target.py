"""GPUs that the portable kernels are compiled for: Metal, Vulkan, OpenCL and WebGPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import tvm

from kvq.errors import CompileError
from kvq.schedules.backend import Kernels
from kvq.schedules.gpu.limits import GpuLimits

from .device_target import DeviceTarget

#: What a GPU of each kind has at least. Metal: every Apple GPU of a Mac. Vulkan: the limits that the standard
#: guarantees, but 256 threads, and fp16 in buffers and arithmetic. OpenCL: GPUs with ``cl_khr_fp16``.
#: WebGPU: the defaults of its standard and ``shader-f16``.
GPU_LIMITS = {
    "metal": GpuLimits(threads=256, shared_bytes=32768, subgroup=32, storage_buffers=31),
    "vulkan": GpuLimits(threads=256, shared_bytes=16384, storage_buffers=16),
    "opencl": GpuLimits(threads=256, shared_bytes=32768, storage_buffers=32),
    "webgpu": GpuLimits(threads=256, shared_bytes=16384, storage_buffers=16),
}


@dataclass(frozen=True)
class GpuTarget(DeviceTarget):
    """GPUs to compile the portable kernels for.

    Attributes
    ----------
    kind : str
        A key of :data:`GPU_LIMITS`, which is TVM's kind of target as well.
    limits : GpuLimits
        What the kernels keep to.
    host : dict
        What TVM's ``Target`` takes for the CPU that launches them; any of this machine's kind by default.
    """

    kind: str
    limits: GpuLimits
    host: dict[str, Any] = field(default_factory=lambda: {"kind": "llvm"})

    pack_imports = None

    @property
    def kernels(self) -> Kernels:
        from kvq.schedules.gpu.backend import GpuKernels

        return GpuKernels(self.kind, self.limits)

    @property
    def description(self) -> dict[str, Any]:
        return {"kind": self.kind, "limits": asdict(self.limits)}

    @property
    def target(self) -> tvm.target.Target:
        options: dict[str, Any] = {"kind": self.kind}
        if self.kind != "webgpu":  # whose kind of target has neither; what Relax legalizes takes 256 threads
            options["max_threads_per_block"] = self.limits.threads
            options["max_shared_memory_per_block"] = self.limits.shared_bytes
        if self.kind == "metal":  # TVM would exchange registers among more lanes than Apple's 32
            options["thread_warp_size"] = 1
        return tvm.target.Target(options, host=self.host)


def gpu_target(
    kind: str, *, host: dict[str, Any] | None = None, limits: GpuLimits | None = None
) -> GpuTarget:
    """The target of GPUs of a kind.

    Parameters
    ----------
    kind : str
        A key of :data:`GPU_LIMITS`.
    host : dict, optional
        As :class:`GpuTarget` takes it; this machine's kind by default.
    limits : GpuLimits, optional
        Of the GPUs, where they are known better.

    Raises
    ------
    CompileError
        Where TVM has no code generator for the kind.
    """
    if tvm.get_global_func(f"target.build.{kind}", allow_missing=True) is None:
        hint = "pip install kvq-vulkan" if kind == "vulkan" else "use a build of TVM that has it"
        raise CompileError(f"TVM has no code generator for {kind}: {hint}")
    return GpuTarget(kind, limits or GPU_LIMITS[kind], *([host] if host else []))
