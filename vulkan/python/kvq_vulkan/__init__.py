"""Vulkan for stock TVM: a SPIR-V code generator in Python and a runtime in C++.

TVM finds the package by its entry point (``tvm.backends``) when it is imported, with its compiler or without.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

__version__ = "0.1.0"
__all__ = ["check", "limits", "num_devices", "problem", "register", "shaders"]

_LIBRARY = "kvq_vulkan.dll" if sys.platform == "win32" else "libkvq_vulkan.so"


def register() -> None:
    """Load the runtime and register the code generator; what TVM's entry point calls."""
    import tvm_ffi

    if tvm_ffi.get_global_func("kvq_vulkan.limits", allow_missing=True) is not None:
        return
    ctypes.CDLL(str(Path(__file__).parent / _LIBRARY))

    def build(mod: Any, target: Any) -> Any:
        from .codegen import build

        return build(mod, target)

    tvm_ffi.register_global_func("target.build.vulkan", build, override=True)


def num_devices() -> int:
    """Devices of this machine."""
    return int(_function("num_devices")())


def problem() -> str:
    """Why this machine has no devices; empty if it has."""
    return str(_function("problem")())


def limits(device_id: int = 0) -> dict[str, Any]:
    """What a device can do: its name, and numbers.

    Raises
    ------
    RuntimeError
        If there is no such device.
    """
    return {str(name): value for name, value in _function("limits")(device_id).items()}


def check(module: Any, device_id: int = 0) -> None:
    """Check that a device can run a library's kernels: what it and the modules that it imports hold.

    Raises
    ------
    RuntimeError
        If not, naming the limit.
    """
    for part in _vulkan_parts(module):
        _function("check")(part, device_id)


def shaders(module: Any) -> dict[str, bytes]:
    """The SPIR-V of a library's kernels, by name."""
    found: dict[str, bytes] = {}
    for part in _vulkan_parts(module):
        found |= {str(name): bytes(code) for name, code in _function("spirv")(part).items()}
    return found


def _vulkan_parts(module: Any) -> list[Any]:
    parts = [module] if module.kind == "vulkan" else []
    for imported in module.imports:
        parts += _vulkan_parts(imported)
    return parts


def _function(name: str) -> Any:
    import tvm  # noqa: F401 (ours stands on its runtime)
    import tvm_ffi

    register()
    return tvm_ffi.get_global_func(f"kvq_vulkan.{name}")
