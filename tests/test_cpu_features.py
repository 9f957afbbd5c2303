"""CPU features by one set of names, and cores."""

from __future__ import annotations

import os

import pytest

from kvq import cpu_features
from kvq.cpu_features import detect, parse_cpuinfo, usable_cores


def test_names_of_both_architectures() -> None:
    x86 = "processor\t: 0\nflags\t\t: fpu sse2 avx2 fma f16c avx512f avx512_vnni avx_vnni amx_int8 avx512bw\n"
    assert parse_cpuinfo(x86) == {
        *("avx2", "fma", "f16c", "avx512f", "avx512vnni", "avx_vnni", "amx_int8", "avx512bw")
    }
    arm = "processor\t: 0\nFeatures\t: fp asimd evtstrm asimddp crc32\n"
    assert parse_cpuinfo(arm) == {"neon", "dotprod"}
    assert parse_cpuinfo("nothing: here\n") == set()


def test_detect_gives_a_copy() -> None:
    detect().add("magic")
    assert "magic" not in detect()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs an affinity")
@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 4),
        ({"cpu0/": "0-1", "cpu1/": "0-1", "cpu2/": "2-3", "cpu3/": "2-3"}, 2),
        ({"cpu.max": "max 100000"}, 4),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "20000 100000"}, 1),
    ],
)
def test_usable_cores(files: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    monkeypatch.setattr(
        cpu_features, "_read", lambda path: next((v for part, v in files.items() if part in path), "")
    )
    assert usable_cores() == cores
