"""Hosts: the operating systems and processors that a library may be loaded on, wherever it is compiled."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Any

from kvq.cpu_features import detect
from kvq.errors import CompileError

#: What x86-64 kernels need, by the name of ``--mcpu``: nothing, AVX2, or AVX-512 with VNNI.
X86_LEVELS: dict[str, tuple[str, ...]] = {
    "x86-64": (),
    "x86-64-v3": ("avx2", "fma", "f16c"),
    "x86-64-v4": ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512vnni"),
}


@dataclass(frozen=True)
class Host:
    """A host.

    Attributes
    ----------
    name : str
        A key of :data:`HOSTS`.
    arch : str
        ``x86_64`` or ``aarch64``.
    triple : str
        What LLVM calls it.
    zig : str
        What the linker of the package ``ziglang`` calls it.
    suffix : str
        Of shared libraries.
    cpu : str
        The oldest CPU that libraries are compiled for elsewhere, as LLVM calls it.
    """

    name: str
    arch: str
    triple: str
    zig: str
    suffix: str
    cpu: str

    @property
    def is_here(self) -> bool:
        """Whether it is this machine's."""
        return self == this_host()

    def options(self) -> dict[str, Any]:
        """What TVM's ``Target`` takes for code that only launches a GPU's kernels."""
        return (
            {"kind": "llvm"} if self.is_here else {"kind": "llvm", "mtriple": self.triple, "mcpu": self.cpu}
        )

    def features(self, mcpu: str | None = None) -> set[str]:
        """CPU features that kernels may use: of ``--mcpu``, of this machine, or of :attr:`cpu`.

        Raises
        ------
        CompileError
            For a level that the architecture does not have.
        """
        if mcpu is None and self.is_here:
            return detect()
        if self.arch != "x86_64":
            if mcpu is not None:
                raise CompileError(f"--mcpu {mcpu} goes with x86-64 hosts, not with {self.name}")
            return {"neon"}
        level = mcpu or self.cpu
        if level not in X86_LEVELS:
            raise CompileError(f"--mcpu {level!r} is unknown: use one of {', '.join(X86_LEVELS)}")
        return set(X86_LEVELS[level])


#: Every host, by name. Linux needs the glibc of TVM's own wheels.
HOSTS = {
    host.name: host
    for host in (
        Host("linux-x86_64", "x86_64", "x86_64-linux-gnu", "x86_64-linux-gnu.2.28", ".so", "x86-64-v3"),
        Host("linux-aarch64", "aarch64", "aarch64-linux-gnu", "aarch64-linux-gnu.2.28", ".so", "generic"),
        Host("macos-arm64", "aarch64", "arm64-apple-macos12", "aarch64-macos.12.0", ".dylib", "apple-m1"),
        Host("windows-x86_64", "x86_64", "x86_64-pc-windows-msvc", "x86_64-windows-gnu", ".dll", "x86-64-v3"),
        Host("android", "aarch64", "aarch64-linux-android28", "aarch64-linux-android", ".so", "generic"),
    )
}

#: Where a library for each device can run: the hosts that have a driver and a runtime for it.
DEVICE_HOSTS = {
    "cpu": tuple(HOSTS),
    "cuda": ("linux-x86_64", "linux-aarch64"),
    "metal": ("macos-arm64",),
    "vulkan": ("linux-x86_64", "linux-aarch64", "windows-x86_64", "android"),
    "opencl": ("linux-x86_64", "linux-aarch64", "windows-x86_64", "android"),
    "webgpu": tuple(HOSTS),
}

_SYSTEMS = {"Linux": "linux", "Darwin": "macos", "Windows": "windows"}
_MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}


def this_host() -> Host:
    """This machine's host; where it is none of :data:`HOSTS`, one that only this machine can compile for."""
    system = _SYSTEMS.get(platform.system(), platform.system().lower())
    machine = _MACHINES.get(platform.machine().lower(), platform.machine().lower())
    name = f"{system}-{'arm64' if system == 'macos' and machine == 'aarch64' else machine}"
    if "ANDROID_ROOT" in os.environ:
        name = "android"
    suffix = {"macos": ".dylib", "windows": ".dll"}.get(system, ".so")
    return HOSTS.get(name) or Host(name, machine, "", "", suffix, "generic")


def split_device(device: str, host: str | None = None) -> tuple[str, Host]:
    """The device and the host of ``--device`` and ``--host``.

    Parameters
    ----------
    device : str
        A device, with or without a host: ``metal``, ``cpu:linux-aarch64``; ``android`` is ``vulkan:android``.
    host : str, optional
        The host alone.

    Returns
    -------
    str, Host
        By default this machine's, or the only one that has the device.

    Raises
    ------
    CompileError
        For a name that is unknown, or a host without that device.
    """
    kind, _, named = ("vulkan:android" if device == "android" else device).partition(":")
    if kind not in DEVICE_HOSTS:
        known = ", ".join(DEVICE_HOSTS)
        raise CompileError(
            f"--device {device!r} cannot be compiled for: use one of {known}, or cpu:linux-aarch64"
        )
    if named and host and named != host:
        raise CompileError(f"--device {device} and --host {host} name different hosts")
    possible, here = DEVICE_HOSTS[kind], this_host()
    chosen = named or host or (here.name if here.name in possible or kind == "cpu" else possible[0])
    if chosen == here.name and kind == "cpu":
        return kind, here
    if chosen not in HOSTS:
        raise CompileError(f"host {chosen!r} is unknown: use one of {', '.join(HOSTS)}")
    if chosen not in possible:
        raise CompileError(
            f"{kind} does not run on {chosen}: use {', '.join(f'{kind}:{h}' for h in possible)}"
        )
    return kind, HOSTS[chosen]
