"""What this machine can compile for, what it can run, and what is missing."""

from __future__ import annotations

from dataclasses import dataclass

from kvq.compiler.fatbin import find_nvcc
from kvq.compiler.gpu_target import GPU_LIMITS, gpu_target
from kvq.compiler.hosts import DEVICE_HOSTS, HOSTS, Host
from kvq.compiler.link import linker_for
from kvq.errors import KvqError
from kvq.runtime.device import DEVICES, Device

#: Who runs the libraries that kvq itself cannot.
_ELSEWHERE = {
    "opencl": "needs a build of TVM with its OpenCL runtime; stock wheels have none",
    "webgpu": "runs in a browser, by TVM's web runtime; kvq has none",
}


@dataclass(frozen=True)
class Availability:
    """A device with a host.

    Attributes
    ----------
    name : str
        As ``--device`` takes it.
    compiles, runs : str
        ``yes``, or what is missing and how to get it.
    """

    name: str
    compiles: str
    runs: str


def list_devices() -> list[Availability]:
    """Every device with every host that it exists on."""
    found = []
    for kind, names in DEVICE_HOSTS.items():
        if kind in _ELSEWHERE:
            compiles = _compile_problem(kind, HOSTS[names[0]]) or "yes"
            found.append(Availability(kind, compiles, _ELSEWHERE[kind]))
            continue
        for name in names:
            host = HOSTS[name]
            runs = (_run_problem(kind) or "yes") if host.is_here else f"on {name}"
            found.append(Availability(f"{kind}:{name}", _compile_problem(kind, host) or "yes", runs))
    return found


def _compile_problem(kind: str, host: Host) -> str | None:
    try:
        if kind in GPU_LIMITS:
            gpu_target(kind)
        elif kind == "cuda":
            find_nvcc()
        linker_for(host)
    except KvqError as error:
        return str(error)
    return None


def _run_problem(kind: str) -> str | None:
    if kind not in DEVICES:
        return f"not by this version of kvq, which runs {', '.join(DEVICES)}"
    try:
        Device.open(kind)
    except KvqError as error:
        return str(error)
    return None
