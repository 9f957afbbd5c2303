"""Where kernel tests run: each backend makes kernels and runs them on numpy arrays.

A test that takes the fixture :func:`backend` runs on all of them; a new one needs an entry in
:data:`BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pytest
import tvm
from tvm import tirx

import msl_emulator
import vulkan_runner
import wgsl_runner
from kvq.compiler.gpu_target import GpuTarget, gpu_target
from kvq.compiler.target import CpuTarget, cpu_target
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


def on_tensors(func: Any, arguments: tuple[Any, ...], device: Any = None) -> None:
    """Call a function of TVM tensors with numpy arrays; whatever it wrote is in the arrays afterwards."""
    given = [
        tvm.runtime.tensor(np.ascontiguousarray(a), device) if isinstance(a, np.ndarray) else a
        for a in arguments
    ]
    func(*given)
    for array, tensor in zip(arguments, given, strict=True):
        if isinstance(array, np.ndarray) and array.flags.writeable:
            array[...] = tensor.numpy()


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


CPU = CpuBackend()
#: All of them.
BACKENDS: tuple[KernelBackend, ...] = (
    CPU,
    GpuBackend("wgsl", "webgpu", wgsl_runner.missing, wgsl_runner.WgslKernel),
    GpuBackend("msl", "metal", msl_emulator.missing, msl_emulator.MslKernel),
    GpuBackend("vulkan", "vulkan", vulkan_runner.missing, vulkan_kernel),
)


@pytest.fixture(scope="session", params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    """Each backend in turn; to be imported by a test module."""
    reason = request.param.missing()
    if reason is not None:
        pytest.skip(reason)
    return request.param
