"""What the CPU of this machine offers: vector instructions, by one set of names everywhere, and cores."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

#: Our names by the names that Linux prints in /proc/cpuinfo.
_LINUX_NAMES = {
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512vl": "avx512vl",
    "avx512_vnni": "avx512vnni",
    "avx_vnni": "avx_vnni",
    "amx_int8": "amx_int8",
    "asimd": "neon",
    "asimddp": "dotprod",
}


def parse_cpuinfo(text: str) -> set[str]:
    """Features named in the text of /proc/cpuinfo (first processor)."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return {_LINUX_NAMES[flag] for flag in value.split() if flag in _LINUX_NAMES}
    return set()


@cache
def _detect() -> frozenset[str]:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        return frozenset(parse_cpuinfo(cpuinfo.read_text()))
    if platform.machine().lower() in ("arm64", "aarch64"):
        # Every 64-bit Arm machine of Apple or Microsoft that runs Python has both.
        return frozenset({"neon", "dotprod"})
    return frozenset()


def detect() -> set[str]:
    """Names of the features of this CPU; empty where they cannot be found out.

    Returns
    -------
    set of str
        Of ``avx2 fma f16c avx512f avx512bw avx512vl avx512vnni avx_vnni amx_int8 neon dotprod``.
    """
    return set(_detect())


def usable_cores() -> int:
    """Physical cores that this process may use: by its affinity, and by its container's quota.

    Two hyperthreads of a core count once, as they share what the kernels are limited by.
    """
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # macOS and Windows have no affinity to ask for
        return os.cpu_count() or 1
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = {_read(topology.format(cpu)) or str(cpu) for cpu in allowed}
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        return max(1, min(len(cores), round(int(quota) / int(period))))
    return len(cores)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
