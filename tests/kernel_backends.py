"""Where kernel tests run: each backend makes kernels and runs them on numpy arrays.

A test with a parameter for :data:`BACKENDS` runs on all of them; a new one needs an entry there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, Protocol

import pytest
import tvm
from tvm import tirx

import msl_emulator
import vulkan_runner
import wgsl_runner
from kernel_rig import CacheKernels, on_tensors
from kvq.compiler.gpu_target import GpuTarget, gpu_target
from kvq.compiler.target import CpuTarget, cpu_target
from kvq.layout import KVLayout
from kvq.schedules.attention_variant import AttentionVariant
from kvq.schedules.backend import Kernels

#: A compiled kernel: numpy arrays and numbers in the order of its arguments, outputs written in place.
Kernel = Callable[..., None]


class KernelBackend(Protocol):
    """Something that kernels run on.

    Attributes
    ----------
    name : str
        What tests call it.
    kernels : Kernels
        The kernels that the compiler would take for it.
    """

    @property
    def name(self) -> str: ...

    @property
    def kernels(self) -> Kernels: ...

    def missing(self) -> str | None:
        """What this machine lacks to run kernels; None: nothing."""
        ...

    def build(self, func: tirx.PrimFunc) -> Kernel:
        """Compile a kernel."""
        ...


class CpuBackend:
    """This machine's CPU."""

    def __init__(self, opt: str = "O2") -> None:
        self.name, self._opt = "cpu" if opt == "O2" else f"cpu-{opt}", opt

    @cached_property
    def _target(self) -> CpuTarget:
        return cpu_target(self._opt)

    @property
    def kernels(self) -> Kernels:
        return self._target.kernels

    def missing(self) -> None:
        return None

    def build(self, func: tirx.PrimFunc) -> Kernel:
        built = tvm.compile(func.with_attr("global_symbol", "main"), target=self._target.target)["main"]
        return lambda *arguments: on_tensors(built, arguments)


class GpuBackend:
    """A GPU's kernels, in the language that they are compiled to.

    Parameters
    ----------
    name, kind : str
        The tests' name and the compiler's.
    missing : callable
        As :class:`KernelBackend` has it.
    run : callable
        Makes a kernel of a PrimFunc and the target.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        missing: Callable[[], str | None],
        run: Callable[[tirx.PrimFunc, GpuTarget], Kernel],
    ) -> None:
        self.name, self.missing = name, missing
        self._kind, self._run = kind, run

    @cached_property
    def _target(self) -> GpuTarget:
        return gpu_target(self._kind)

    @property
    def kernels(self) -> Kernels:
        return self._target.kernels

    def build(self, func: tirx.PrimFunc) -> Kernel:
        return self._run(func, self._target)


def vulkan_kernel(func: tirx.PrimFunc, target: GpuTarget) -> Kernel:
    """A kernel on the first Vulkan device."""
    built = vulkan_runner.build(func, target)
    return lambda *arguments: on_tensors(built, arguments, vulkan_runner.device())


@cache
def kernel(backend: KernelBackend, name: str, *arguments: Any) -> Kernel:
    """The kernel that ``backend.kernels`` makes of the arguments."""
    return backend.build(getattr(backend.kernels, name)(*arguments))


@cache
def cache_kernels(
    backend: KernelBackend, layout: KVLayout, num_heads: int, variant: AttentionVariant
) -> CacheKernels:
    """A cache's kernels."""
    shape = backend.kernels.attention_shape(layout, num_heads)
    return CacheKernels(
        kernel(backend, "kv_append", layout, num_heads, layout.head_dim, layout.head_dim**-0.5, "float32"),
        kernel(backend, "kv_seal", layout, num_heads),
        kernel(backend, "paged_attention", layout, num_heads, "float32", variant),
        kernel(backend, "kv_carry", layout),
        shape.split_pages,
        shape.tile_rows,
        shape.scratch_extra,
    )


CPU = CpuBackend()
#: All of them.
BACKENDS: tuple[KernelBackend, ...] = (
    CPU,
    GpuBackend("wgsl", "webgpu", wgsl_runner.missing, wgsl_runner.WgslKernel),
    GpuBackend("msl", "metal", msl_emulator.missing, msl_emulator.MslKernel),
    GpuBackend("vulkan", "vulkan", vulkan_runner.missing, vulkan_kernel),
)


def present(backend: KernelBackend) -> KernelBackend:
    """The backend; skips the test where the machine lacks something."""
    if reason := backend.missing():
        pytest.skip(reason)
    return backend
