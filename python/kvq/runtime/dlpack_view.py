"""A view into a tensor that starts where its data pointer says.

TVM's own views keep the pointer and an offset beside it, which compiled kernels refuse.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import tvm_ffi

#: Code of signed integers in DLPack.
_INT = 0
_NAME = b"dltensor"


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Int32View:
    """Some numbers of an int32 tensor, as a tensor of their own.

    Parameters
    ----------
    buffer : tvm.runtime.Tensor
        int32, contiguous.
    start : int
        Number at which the view starts.
    shape : tuple of int

    Attributes
    ----------
    tensor : tvm_ffi.Tensor
        The view; good for as long as this object and the buffer live.
    """

    def __init__(self, buffer: Any, start: int, shape: tuple[int, ...]) -> None:
        self._device = buffer.__dlpack_device__()
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        sizes = ctypes.c_int64 * len(shape)
        self._shape, self._strides = sizes(*shape), sizes(*strides)
        kind, index = (int(number) for number in self._device)
        tensor = _DLTensor(
            buffer.data_ptr() + 4 * start, kind, index, len(shape), _INT, 32, 1, self._shape, self._strides, 0
        )
        self._managed = _DLManagedTensor(tensor, None, None)
        self.tensor = tvm_ffi.from_dlpack(self)

    def __dlpack__(self, **_options: Any) -> Any:
        """The capsule that DLPack's protocol asks for."""
        return _new_capsule(ctypes.addressof(self._managed), _NAME, None)

    def __dlpack_device__(self) -> Any:
        """Device kind and index."""
        return self._device
