"""Linking: objects to a shared library, with whatever C compiler the machine has."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys

from kvq.errors import CompileError

_COMPILERS = ("cc", "gcc", "clang", "g++", "c++")


def find_linker() -> list[str]:
    """The command that links: ``$CC``, a C compiler on the path, or the one in the package ``ziglang``.

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
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise CompileError("no C compiler to link the library with: install gcc or clang, or pip install ziglang")


def link_shared(output: str, objects: list[str], **_: object) -> None:
    """Link ``objects`` to the shared library ``output``; the ``fcompile`` of TVM's ``export_library``.

    Raises
    ------
    CompileError
        If the linker fails, with its last line.
    """
    command = [*find_linker(), "-shared", "-fPIC", "-o", output, *objects]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise CompileError(f"{command[0]} could not link {output}: {lines[-1]}")


link_shared.object_format = "o"  # type: ignore[attr-defined]
