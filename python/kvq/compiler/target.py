"""Targets: what to compile for, which kernels that takes, and what a machine must have."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import tvm
from tvm import relax
from tvm.ir.transform import Pass

from kvq.errors import CompileError
from kvq.gpu_features import OLDEST_CUDA_ARCH, cuda_archs
from kvq.schedules.backend import Kernels
from kvq.schedules.cpu.backend import CpuKernels
from kvq.schedules.cpu.vector import CpuIsa

from .device_target import DeviceTarget
from .gpu_target import GPU_LIMITS, gpu_target
from .hosts import X86_LEVELS, Host, this_host

#: CUDA architectures of a library that is compiled where there is no GPU: A100, RTX 40, H100.
DEFAULT_CUDA_ARCHS = ("sm_80", "sm_89", "sm_90")
#: Optimization levels whose products take activations as they are.
EXACT_LEVELS = ("O0", "O1")


class CompileTarget(Protocol):
    """What the compiler needs to know of a device.

    Attributes
    ----------
    features : tuple of str
        CPU features the library needs, as :func:`kvq.cpu_features.detect` names them.
    kernels : Kernels
        The backend.
    description : dict
        The metadata's ``target``.
    target : tvm.target.Target
        TVM's target.
    relax_pipeline : Pass
        What follows kvq's own passes.
    tir_pipeline : str
        Pipeline that lowers the kernels.
    pack_imports : callable or None
        ``fpack_imports`` of TVM's ``export_library``.
    """

    @property
    def features(self) -> tuple[str, ...]: ...

    @property
    def kernels(self) -> Kernels: ...

    @property
    def description(self) -> dict[str, Any]: ...

    @property
    def target(self) -> tvm.target.Target: ...

    @property
    def relax_pipeline(self) -> Pass: ...

    @property
    def tir_pipeline(self) -> str: ...

    @property
    def pack_imports(self) -> Callable[..., str] | None: ...


@dataclass(frozen=True)
class CpuTarget:
    """A CPU to compile for.

    Attributes
    ----------
    options : dict
        What TVM's ``Target`` takes.
    isa : CpuIsa
        Instructions the kernels may use.
    """

    options: dict[str, Any]
    isa: CpuIsa
    features: tuple[str, ...]

    tir_pipeline = "default"
    pack_imports = None

    @property
    def kernels(self) -> CpuKernels:
        return CpuKernels(self.isa)

    @property
    def description(self) -> dict[str, Any]:
        return self.options

    @property
    def target(self) -> tvm.target.Target:
        return tvm.target.Target(self.options)

    @property
    def relax_pipeline(self) -> Pass:
        return relax.get_default_pipeline(self.target)


def cpu_target(opt: str = "O2", features: set[str] | None = None, host: Host | None = None) -> CpuTarget:
    """Choose from the features of a CPU; ``mcpu native`` would trust what a virtual machine pretends.

    Parameters
    ----------
    opt : str
        ``O0`` takes the baseline of the architecture, whatever the CPU has.
    features : set of str, optional
        Of the CPU to compile for; by default those that the host says.
    host : Host, optional
        Where the library will be loaded; this machine by default.
    """
    host = host or this_host()
    have = host.features() if features is None else features
    base: dict[str, Any] = {"kind": "llvm"}
    if host.is_here:
        base["num-cores"] = os.cpu_count() or 1
    else:
        base["mtriple"] = host.triple
    if host.arch == "aarch64":
        return CpuTarget({**base, "mcpu": host.cpu, "mattr": ["+neon"]}, CpuIsa(8, "generic"), ())
    if opt != "O0" and have.issuperset(X86_LEVELS["x86-64-v4"]):
        options = {**base, "mcpu": "x86-64-v4", "mattr": ["+avx512vnni"]}
        return CpuTarget(options, CpuIsa(16, "vnni512"), X86_LEVELS["x86-64-v4"])
    if opt != "O0" and have.issuperset(X86_LEVELS["x86-64-v3"]):
        return CpuTarget({**base, "mcpu": "x86-64-v3"}, CpuIsa(8, "maddubs"), X86_LEVELS["x86-64-v3"])
    return CpuTarget({**base, "mcpu": "x86-64"}, CpuIsa(8, "generic"), ())


@dataclass(frozen=True)
class CudaTarget(DeviceTarget):
    """NVIDIA GPUs to compile for.

    Attributes
    ----------
    archs : tuple of str
        Architectures with machine code in the library, oldest first.
    activations : str
        What products take: ``float16`` or ``bfloat16``, on tensor cores, or ``float32``.
    host : dict
        What TVM's ``Target`` takes for the CPU that launches kernels.
    """

    archs: tuple[str, ...]
    activations: str = "float32"
    host: dict[str, Any] = field(default_factory=lambda: {"kind": "llvm"})

    @property
    def kernels(self) -> Kernels:
        from kvq.schedules.cuda.backend import CudaKernels

        return CudaKernels(self.archs, self.activations)

    @property
    def description(self) -> dict[str, Any]:
        return {"kind": "cuda", "archs": list(self.archs)}

    @property
    def target(self) -> tvm.target.Target:
        options = {
            "kind": "cuda",
            "arch": self.archs[0],
            "max_threads_per_block": 1024,
            "max_shared_memory_per_block": 49152,
            "thread_warp_size": 32,
        }
        return tvm.target.Target(options, host=self.host)

    @property
    def pack_imports(self) -> Callable[..., str]:
        from .fatbin import pack_imports

        return pack_imports(self.archs)


def cuda_target(archs: str | None = None, activations: str = "float32") -> CudaTarget:
    """The GPUs of ``--cuda-arch``; by default those of this machine, or :data:`DEFAULT_CUDA_ARCHS`.

    ``activations`` is what products take, as :class:`CudaTarget` says.

    Raises
    ------
    CompileError
        For a name that is no architecture, or one without the instructions the kernels need.
    """
    if archs is None:
        return CudaTarget(cuda_archs() or DEFAULT_CUDA_ARCHS, activations)
    found: dict[str, int] = {}
    for name in archs.split(","):
        matched = re.fullmatch(r"sm_(\d{2,3})[af]?", name.strip())
        if matched is None or int(matched.group(1)) < OLDEST_CUDA_ARCH:
            raise CompileError(
                f"--cuda-arch {name.strip()!r} cannot be compiled for: use sm_80 (Ampere) or newer, "
                f"e.g. {','.join(DEFAULT_CUDA_ARCHS)}"
            )
        found[name.strip()] = int(matched.group(1))
    return CudaTarget(tuple(sorted(found, key=lambda name: (found[name], name))), activations)


def target_for(
    device: str,
    opt: str,
    cuda_arch: str | None = None,
    host: Host | None = None,
    mcpu: str | None = None,
    activations: str = "float16",
) -> CompileTarget:
    """The target of ``--device``.

    Parameters
    ----------
    device : str
        A key of :data:`~kvq.compiler.hosts.DEVICE_HOSTS`.
    opt : str
        The optimization level.
    cuda_arch, mcpu : str, optional
        What the options of that name say.
    host : Host, optional
        Where the library will be loaded; this machine by default.
    activations : str
        What products on tensor cores take, ``float16`` or ``bfloat16``; other devices have none.

    Raises
    ------
    CompileError
        For a device that cannot be compiled for here, or an option that goes with another one.
    """
    if cuda_arch is not None and device != "cuda":
        raise CompileError("--cuda-arch goes with --device cuda")
    if mcpu is not None and device != "cpu":
        raise CompileError("--mcpu goes with --device cpu: a GPU's library runs on any CPU of its host")
    host = host or this_host()
    if device == "cuda":
        taken = "float32" if opt in EXACT_LEVELS else activations
        return replace(cuda_target(cuda_arch, taken), host=host.options())
    if device in GPU_LIMITS:
        return gpu_target(device, host=host.options())
    return cpu_target(opt, host.features(mcpu), host)
