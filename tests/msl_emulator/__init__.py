"""Runs kernels in the Metal Shading Language on the CPU, thread by thread, with every access checked.

The source is what Metal would compile when a library is loaded. ``msl.h`` holds what it uses of the language;
with that it is C++, and the kernel a program that AddressSanitizer watches. Like TVM's Metal runtime, which
asks for fast math, the compiler may contract and reorder.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tvm import tirx

from device_launches import HostCode, Launch
from kvq.compiler.gpu_target import GpuTarget

_HEADER = Path(__file__).with_name("msl.h")
_FLAGS = ["-std=c++17", "-O1", "-g0", "-w", "-march=haswell", "-ffp-contract=fast", "-fno-strict-aliasing"]
_FLAGS += ["-fsanitize=address", "--param", "asan-stack=0"]

#: What ``msl.h`` calls the attributes of a kernel's parameters.
_PLACES = {
    "threadgroup_position_in_grid": "msl::group_index",
    "thread_position_in_threadgroup": "msl::thread_index()",
}


@cache
def _compiler() -> str | None:
    return shutil.which("g++") or shutil.which("c++")


def missing() -> str | None:
    """Why no kernel can be run here; None if it can."""
    return None if _compiler() else "no C++ compiler"


class MslKernel:
    """A kernel, compiled for Metal."""

    def __init__(self, func: tirx.PrimFunc, target: GpuTarget) -> None:
        self._host = HostCode(func, target)
        self._numbers = {name: i for i, name in enumerate(self._host.sources)}
        functions = ", ".join(f"{{{name}::body, {name}::spoil}}" for name in self._numbers)
        program = "\n".join(
            [
                f'#include "{_HEADER}"',
                *(_function(name, source) for name, source in self._host.sources.items()),
                f"static const msl::Function functions[] = {{{functions}}};",
                "int main() { return msl::serve(functions); }\n",
            ]
        )
        self._directory = TemporaryDirectory(prefix="kvq-msl-")  # as long as the kernel
        directory = Path(self._directory.name)
        code, self._program = directory / "kernel.cpp", directory / "kernel"
        code.write_text(program)
        command = [_compiler() or "g++", *_FLAGS, "-o", self._program, code]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{code}: {done.stderr[:2000]}")

    def __call__(self, *arguments: np.ndarray | int | float) -> None:
        arrays = [a for a in arguments if isinstance(a, np.ndarray)]
        places = {id(a): i for i, a in enumerate(arrays)}
        launches = [self._encode(launch, places) for launch in self._host.launches(*arguments)]
        words = [struct.pack("<I", len(arrays))]
        for array in arrays:
            words += [struct.pack("<Q", array.nbytes), array.tobytes()]
        done = subprocess.run(
            [self._program],
            input=b"".join([*words, struct.pack("<I", len(launches)), *launches]),
            capture_output=True,
            env={"ASAN_OPTIONS": "detect_leaks=0"},
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{self._program}: {done.stderr[:3000].decode(errors='replace')}")
        at = 0
        for array in arrays:
            array[...] = np.frombuffer(done.stdout, array.dtype, array.size, at).reshape(array.shape)
            at += array.nbytes

    def _encode(self, launch: Launch, places: dict[int, int]) -> bytes:
        """A launch as ``msl::serve`` reads it; TVM gives every scalar eight bytes."""
        scalars = b"".join(
            struct.pack("<f4x" if dtype == "float32" else "<q", value) for value, dtype in launch.scalars
        )
        used = [places[id(a)] for a in launch.arrays]
        head = struct.pack(f"<{2 + len(used)}I", self._numbers[launch.name], len(used), *used)
        return (
            head + struct.pack("<Q", len(scalars)) + scalars + struct.pack("<6I", *launch.grid, *launch.block)
        )


def _function(name: str, source: str) -> str:
    """A kernel's source as a namespace with ``body`` and ``spoil``."""
    source = re.sub(r"^(#include <metal_stdlib>|using namespace metal;)\n", "", source, flags=re.M)
    source = re.sub(r"(\d\.\d+e[+-]\d+)h\b", r"\1_h", source)
    found = re.search(rf"kernel void {name}\((.*?)\n\) \{{\n", source, re.S)
    assert found is not None, "no kernel"
    values = []
    for parameter in found[1].split(",\n"):
        kind, _, attribute = re.fullmatch(r"\s*(.*?)(\w+) \[\[\s*(.*?)\s*\]\]", parameter).groups()
        if attribute.startswith("buffer("):
            place = f"msl::buffers[{attribute[7:-1]}]"
            values.append(f"*({kind.rstrip(' &')}*){place}" if kind.endswith("& ") else f"({kind}){place}")
        else:
            whole = {
                "threadgroup_position_in_grid": "group_index",
                "thread_position_in_threadgroup": "thread_index()",
            }
            values.append(f"msl::{whole[attribute]}")
    head, body = source[: found.end()], source[found.end() :]
    memory = re.findall(r"^\s*threadgroup (\w+) (\w+)\[(\d+)\];\n", body, re.M)
    body = re.sub(r"^\s*threadgroup \w+ \w+\[\d+\];\n", "", body, flags=re.M)
    shared = "".join(f"alignas(16) static {kind} {array}[{size}];\n" for kind, array, size in memory)
    spoil = "".join(f"  memset({array}, 0xff, sizeof {array});\n" for _, array, _ in memory)
    head = re.sub(r"\buint[23]? (\w+) \[\[thread", r"msl::Coordinate \1 [[thread", head)
    head = re.sub(r" \[\[.*?\]\]", "", head)
    before, _, signature = head.partition("kernel void")
    return f"""namespace {name} {{
using namespace msl;
{before}{shared}kernel void{signature}{body}
static void body() {{ {name}({", ".join(values)}); }}
static void spoil() {{
{spoil}}}
}}  // namespace {name}"""
