"""Vulkan devices, through the package kvq-vulkan."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

from kvq.errors import LibraryError

#: What is missing, where a library for Vulkan cannot be read.
INSTALL = "pip install kvq-vulkan (the folder vulkan/ of kvq's repository)"


def _backend(name: str) -> ModuleType:
    try:
        import kvq_vulkan
    except ImportError:
        raise LibraryError(f"device {name!r} needs the package kvq-vulkan: {INSTALL}") from None
    return kvq_vulkan


def find_device(name: str) -> int:
    """The number of a device: of ``vulkan`` 0, of ``vulkan:1`` 1.

    Raises
    ------
    LibraryError
        If there is no such device, or what it takes is not installed.
    """
    matched = re.fullmatch(r"vulkan(?::(\d+))?", name)
    if matched is None:
        raise LibraryError(f"device {name!r} is not supported: use vulkan or, of several, vulkan:1")
    backend = _backend(name)
    number = int(matched.group(1) or 0)
    count = backend.num_devices()
    if count == 0:
        raise LibraryError(f"device {name!r} cannot be used: {backend.problem()}")
    if number >= count:
        names = [backend.limits(found)["name"] for found in range(count)]
        listed = ", ".join(f"vulkan:{found} is {text}" for found, text in enumerate(names))
        raise LibraryError(f"there is no device {name!r}: {listed}")
    return number


def largest_tensor(number: int) -> int:
    """Bytes of the largest buffer that a device binds (``maxStorageBufferRange``)."""
    return int(_backend("vulkan").limits(number)["buffer_bytes"])


def check_library(module: Any, number: int, path: str) -> None:
    """Refuse a library whose kernels a device cannot run.

    Raises
    ------
    LibraryError
        Naming the limit.
    """
    try:
        _backend("vulkan").check(module, number)
    except RuntimeError as error:
        raise LibraryError(f"{path}: {str(error).splitlines()[-1]}") from None
