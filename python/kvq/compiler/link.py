"""Linking: objects to a shared library, for this machine or for another one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kvq.errors import CompileError

from .coff import undefined_symbols
from .hosts import Host

_COMPILERS = ("cc", "gcc", "clang", "g++", "c++")
#: Windows binds each symbol to a library by name: TVM's, by the prefixes of what they export.
_WINDOWS_LIBRARIES = {"TVMFFI": "tvm_ffi", "TVMBackend": "tvm_runtime"}


def has_zig() -> bool:
    """Whether there is the package ``ziglang``, which links for every host."""
    return importlib.util.find_spec("ziglang") is not None


def find_linker() -> list[str]:
    """The command that links for this machine: ``$CC``, a C compiler on the path, or that of ``ziglang``.

    Raises
    ------
    CompileError
        If there is none.
    """
    chosen = os.environ.get("CC")
    if chosen:
        return chosen.split()
    for name in _COMPILERS:
        found = shutil.which(name)
        if found:
            return [found]
    if has_zig():
        return [sys.executable, "-m", "ziglang", "cc"]
    raise CompileError("no C compiler to link the library with: install gcc or clang, or pip install ziglang")


def linker_for(host: Host) -> Callable[..., None]:
    """The ``fcompile`` of TVM's ``export_library`` that links for a host.

    Raises
    ------
    CompileError
        If there is nothing to link for it with.
    """
    if host.is_here:
        command = find_linker()
    elif has_zig():
        command = [sys.executable, "-m", "ziglang", "cc", "-target", host.zig]
    else:
        raise CompileError(f"linking for {host.name} needs the package ziglang: pip install 'kvq[cross]'")

    def link(output: str, objects: list[str], **_: object) -> None:
        # what the library takes from TVM is in the process already, when it is loaded
        extra = []
        if host.suffix == ".dylib":
            extra = ["-Wl,-undefined,dynamic_lookup"]
        elif host.suffix == ".dll":
            extra = _import_libraries(objects)
        elif host.name == "android":
            extra = ["-nostdlib"]
        _run([*command, "-shared", "-fPIC", "-o", output, *objects, *extra], output)

    link.object_format = "o"  # type: ignore[attr-defined]
    return link


def _run(command: list[str], output: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise CompileError(f"{command[0]} could not link {output}: {lines[-1]}")


def _import_libraries(objects: list[str]) -> list[str]:
    """Import libraries, beside the objects, for what they take from TVM's libraries."""
    undefined = sorted(set().union(*(undefined_symbols(Path(path).read_bytes()) for path in objects)))
    made = []
    for prefix, library in _WINDOWS_LIBRARIES.items():
        names = [name for name in undefined if name.startswith(prefix)]
        definition = Path(objects[0]).with_name(f"{library}.def")
        definition.write_text("\n".join([f"LIBRARY {library}.dll", "EXPORTS", *names, ""]))
        out = str(definition.with_suffix(".lib"))
        tool = [sys.executable, "-m", "ziglang", "dlltool", "-m", "i386:x86-64"]
        _run([*tool, "-d", str(definition), "-l", out], out)
        made.append(out)
    return made
