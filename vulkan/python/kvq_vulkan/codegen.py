"""``target.build.vulkan``: device functions to a module of TVM's runtime, by way of its serialized form."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import tvm_ffi

from .kernel import Kernel, compile_kernel

#: First word of the serialized form, and its version; ``src/module.cc`` reads the same.
MAGIC, VERSION = 0x4B56514B, 1


def build(mod: Any, _target: Any) -> Any:
    """Compile all device functions of a module; what TVM calls for the target kind ``vulkan``."""
    kernels = [compile_kernel(gvar.name_hint, func) for gvar, func in mod.functions.items()]
    return tvm_ffi.get_global_func("ffi.Module.load_from_bytes.vulkan")(serialize(kernels))


def serialize(kernels: Sequence[Kernel]) -> bytes:
    """The bytes of a library: little-endian words; strings and code have their length before them."""
    out = [struct.pack("<3I", MAGIC, VERSION, len(kernels))]
    for kernel in kernels:
        for text in (kernel.name, kernel.arguments, kernel.grid):
            out.append(_prefixed(text.encode()))
        out.append(struct.pack("<5I", *kernel.threads, kernel.shared_bytes, kernel.subgroup))
        out.append(_prefixed(kernel.spirv))
    return b"".join(out)


def _prefixed(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data
