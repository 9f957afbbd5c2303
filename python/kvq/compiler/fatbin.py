"""CUDA machine code inside the library: nvcc called here, so that nothing is compiled where the library runs.

TVM stores a CUDA module without a CUDA runtime at hand as source, to be compiled when the library is loaded.
``pack_imports`` writes the same bytes with a fatbin in the place of the source: machine code for each
architecture, and PTX of the newest one for the GPUs that come after it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvm.runtime import _ffi_api

from kvq.errors import CompileError

#: What TVM's CUDA module calls its content: source, or anything that the driver loads.
_SOURCE, _BINARY = b"cuda", b"cubin"
#: A shared object's symbol with the modules that its code imports.
_SYMBOL = "__tvm_ffi__library_bin"


def find_nvcc() -> str:
    """Path of nvcc: on ``$PATH``, under ``$CUDA_HOME``, or in the wheel ``nvidia-cuda-nvcc``.

    Raises
    ------
    CompileError
        If there is none.
    """
    for home in filter(None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"))):
        candidate = Path(home) / "bin" / "nvcc"
        if candidate.is_file():
            return str(candidate)
    found = shutil.which("nvcc")
    if found:
        return found
    package = importlib.util.find_spec("nvidia")
    for root in (package.submodule_search_locations or []) if package else []:
        for candidate in sorted(Path(root).glob("cu*/bin/nvcc"), reverse=True):
            return str(candidate)
    raise CompileError(
        "no nvcc to compile CUDA kernels with: pip install 'kvq[gpu]', or set CUDA_HOME to a CUDA toolkit"
    )


def compile_fatbin(source: str, archs: tuple[str, ...]) -> bytes:
    """Compile CUDA source for every architecture.

    Parameters
    ----------
    source : str
        CUDA C++.
    archs : tuple of str
        ``sm_80`` and the like, at least one.

    Raises
    ------
    CompileError
        If there is no nvcc, or it fails; with its first error.
    """
    numbers = sorted({arch.removeprefix("sm_") for arch in archs}, key=_order)
    command = [find_nvcc(), "--fatbin", "-O3", "-std=c++17", "-w", "--threads", "0"]
    for number in numbers:
        command += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
    if numbers[-1].isdigit():  # what is of one architecture alone has no successors
        command += ["-gencode", f"arch=compute_{numbers[-1]},code=compute_{numbers[-1]}"]
    with tempfile.TemporaryDirectory() as directory:
        code, out = Path(directory) / "kernels.cu", Path(directory) / "kernels.fatbin"
        code.write_text(source)
        done = subprocess.run(
            [*command, "-o", str(out), str(code)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
            reason = next((line for line in lines if "error" in line.lower()), lines[-1])
            raise CompileError(f"{command[0]} could not compile the kernels: {reason}")
        return out.read_bytes()


def _order(number: str) -> tuple[int, str]:
    digits = number.rstrip("abcdefghijklmnopqrstuvwxyz")
    return int(digits), number[len(digits) :]


def pack_imports(archs: tuple[str, ...]) -> Callable[[Any, bool, str, str], str]:
    """The ``fpack_imports`` of TVM's ``export_library`` that embeds a fatbin for ``archs``."""

    def pack(module: Any, _is_system_lib: bool, _prefix: str, workspace: str) -> str:
        blob = bytes(_ffi_api.ModulePackImportsToTensor(module).numpy())
        path = Path(workspace) / "imports.bin"
        path.write_bytes(embed_fatbin(blob, archs))
        source = path.with_suffix(".c")
        source.write_text(
            '__asm__(".section .rodata\\n.balign 64\\n'
            f'.global {_SYMBOL}\\n.type {_SYMBOL}, @object\\n{_SYMBOL}:\\n.incbin \\"{path}\\"\\n'
            f'.size {_SYMBOL}, .-{_SYMBOL}\\n.section .note.GNU-stack,\\"\\",@progbits\\n.text");\n'
        )
        return str(source)

    return pack


def embed_fatbin(blob: bytes, archs: tuple[str, ...]) -> bytes:
    """Replace the CUDA source in the bytes of a library's imports by its fatbin.

    The bytes are, in TVM's serialization: their number; the import tree, two lists of numbers; then of each
    module its kind and, unless it is the library itself, its content.
    """
    reader = _Reader(blob, 8)
    for _ in range(2):
        reader.skip(8 * reader.number())
    out = [blob[8 : reader.at]]
    while reader.at < len(blob):
        kind = reader.text()
        out.append(_text(kind))
        if kind != b"_lib":
            content = reader.text()
            out.append(_text(_with_fatbin(content, archs) if kind == b"cuda" else content))
    body = b"".join(out)
    return struct.pack("<Q", len(body)) + body


def _with_fatbin(content: bytes, archs: tuple[str, ...]) -> bytes:
    """A CUDA module's content: its format, its functions and their arguments, its code."""
    reader = _Reader(content, 0)
    if reader.text() != _SOURCE:
        return content
    start = reader.at
    for _ in range(reader.number()):
        reader.text(), reader.text()
        reader.skip(4 * reader.number())  # types of the arguments
        for _ in range(reader.number()):  # launch parameters
            reader.text()
        reader.skip(4 * reader.number())
    functions = content[start : reader.at]
    return _text(_BINARY) + functions + _text(compile_fatbin(reader.text().decode(), archs))


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


class _Reader:
    """Reads numbers and texts from bytes, in order."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def skip(self, count: int) -> None:
        self.at += count

    def number(self) -> int:
        (value,) = struct.unpack_from("<Q", self.data, self.at)
        self.at += 8
        return int(value)

    def text(self) -> bytes:
        size = self.number()
        self.at += size
        return self.data[self.at - size : self.at]
