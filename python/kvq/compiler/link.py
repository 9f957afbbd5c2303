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
_ZIG = [sys.executable, "-m", "ziglang"]
#: The library of mathematical functions, where code says which libraries it needs.
_MATH = {"linux-x86_64": "libm.so.6", "linux-aarch64": "libm.so.6", "android": "libm.so"}
#: Windows binds each symbol to a library: TVM's by the prefixes of what they export, then the system's.
_WINDOWS_LIBRARIES = {"TVMFFI": "tvm_ffi", "TVMBackend": "tvm_runtime", "__chkstk": "ntdll", "": "ucrtbase"}
#: What a Windows library has beside its objects: a mark that it uses floats, and where its loading starts.
_WINDOWS_START = """int _fltused;
int DllMainCRTStartup(void *library, unsigned reason, void *reserved) { return 1; }
"""


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
        return [*_ZIG, "cc"]
    raise CompileError("no C compiler to link the library with: install gcc or clang, or pip install ziglang")


def linker_for(host: Host) -> Callable[..., None]:
    """The ``fcompile`` of TVM's ``export_library`` that links for a host.

    Raises
    ------
    CompileError
        If there is nothing to link for it with.
    """
    if host.is_here:
        command = [*find_linker(), "-shared", "-fPIC"]
    elif has_zig():
        # none of the host's own libraries: kernels take memory functions and mathematics, which are loaded
        # wherever Python is, as is what they take from TVM
        command = [*_ZIG, "cc", "-target", host.zig, "-nostdlib", "-shared", "-fPIC"]
    else:
        raise CompileError(f"linking for {host.name} needs the package ziglang: pip install 'kvq[cross]'")

    def link(output: str, objects: list[str], **_: object) -> None:
        extra = [] if host.is_here else _cross_inputs(host, command, objects, Path(output).name)
        _run([*command, "-o", output, *objects, *extra], output)

    link.object_format = "o"  # type: ignore[attr-defined]
    return link


def _run(command: list[str], output: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise CompileError(f"{command[0]} could not link {output}: {lines[-1]}")


def _cross_inputs(host: Host, command: list[str], objects: list[str], library: str) -> list[str]:
    """What the linker takes beside the objects; made in their directory."""
    directory = Path(objects[0]).parent
    if host.suffix == ".dylib":
        return ["-Wl,-undefined,dynamic_lookup", f"-Wl,-install_name,@rpath/{library}"]
    if host.suffix == ".dll":
        start = directory / "start.c"
        start.write_text(_WINDOWS_START)
        return [str(start), *_import_libraries(objects, directory)]
    empty, math = directory / "empty.c", directory / "libm.so"
    empty.write_text("")
    name = f"-Wl,-soname,{_MATH[host.name]}"
    _run([*command, name, "-o", str(math), str(empty)], str(math))
    return ["-Wl,--no-as-needed", str(math)]


def _import_libraries(objects: list[str], directory: Path) -> list[str]:
    """Import libraries for what objects take from Windows' libraries and TVM's.

    Raises
    ------
    CompileError
        For a function that only a compiler's own library has.
    """
    defined = {"_fltused"}
    undefined = set().union(*(undefined_symbols(Path(path).read_bytes()) for path in objects)) - defined
    made = []
    for prefix, library in _WINDOWS_LIBRARIES.items():
        names = sorted(name for name in undefined if name.startswith(prefix))
        undefined -= set(names)
        if prefix == "" and names and names[0].startswith("__"):
            raise CompileError(
                f"no library of Windows has {names[0]}: use --mcpu x86-64-v3 and --opt O1 or more"
            )
        if names:
            definition = directory / f"{library}.def"
            definition.write_text("\n".join([f"LIBRARY {library}.dll", "EXPORTS", *names, ""]))
            made.append(str(definition.with_suffix(".lib")))
            _run([*_ZIG, "dlltool", "-m", "i386:x86-64", "-d", str(definition), "-l", made[-1]], made[-1])
    return made
