"""Targets: what to compile for, which instructions the kernels may use, and what a machine must have."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Any

import tvm

from kvq.cpu_features import detect
from kvq.errors import CompileError
from kvq.schedules.cpu.vector import CpuIsa

_AVX2 = ("avx2", "fma", "f16c")
_VNNI512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512vnni")


@dataclass(frozen=True)
class CpuTarget:
    """A CPU to compile for.

    Attributes
    ----------
    options : dict
        What TVM's ``Target`` takes.
    isa : CpuIsa
        Instructions the kernels may use.
    features : tuple of str
        CPU features the library needs, as :func:`kvq.cpu_features.detect` names them.
    """

    options: dict[str, Any]
    isa: CpuIsa
    features: tuple[str, ...]

    @property
    def target(self) -> tvm.target.Target:
        """TVM's target."""
        return tvm.target.Target(self.options)


def cpu_target(opt: str = "O2", features: set[str] | None = None) -> CpuTarget:
    """Choose from the features of a CPU; ``mcpu native`` would trust what a virtual machine pretends.

    Parameters
    ----------
    opt : str
        ``O0`` takes the baseline of the architecture, whatever the CPU has.
    features : set of str, optional
        Of the CPU to compile for; this machine's by default.
    """
    have = detect() if features is None else features
    cores = os.cpu_count() or 1
    base: dict[str, Any] = {"kind": "llvm", "num-cores": cores}
    if platform.machine().lower() in ("arm64", "aarch64"):
        return CpuTarget({**base, "mattr": ["+neon"]}, CpuIsa(8, "generic"), ())
    if opt != "O0" and have.issuperset(_VNNI512):
        options = {**base, "mcpu": "x86-64-v4", "mattr": ["+avx512vnni"]}
        return CpuTarget(options, CpuIsa(16, "vnni512"), _VNNI512)
    if opt != "O0" and have.issuperset(_AVX2):
        return CpuTarget({**base, "mcpu": "x86-64-v3"}, CpuIsa(8, "maddubs"), _AVX2)
    return CpuTarget({**base, "mcpu": "x86-64"}, CpuIsa(8, "generic"), ())


def target_for(device: str, opt: str) -> CpuTarget:
    """The target of ``--device``.

    Raises
    ------
    CompileError
        For a device that this version cannot compile for.
    """
    if device != "cpu":
        raise CompileError(f"--device {device!r} cannot be compiled for: this version has 'cpu'")
    return cpu_target(opt)
