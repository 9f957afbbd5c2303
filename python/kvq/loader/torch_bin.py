"""Reads ``pytorch_model*.bin`` without torch, and without running the code that a pickle may hold.

The file is a zip archive: ``data.pkl`` describes the tensors, ``data/KEY`` are their storages, not
compressed. The unpickler below knows the few names a state dict needs and refuses every other.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from kvq.errors import CheckpointError

_STORAGES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class _Storage:
    dtype: np.dtype
    key: str


@dataclass(frozen=True)
class _StoredTensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> _StoredTensor:
    sizes, steps = tuple(int(n) for n in shape), tuple(int(n) for n in stride)
    if not isinstance(storage, _Storage) or len(sizes) != len(steps) or min(offset, *sizes, *steps, 0) < 0:
        raise pickle.UnpicklingError("it holds a tensor that makes no sense")
    return _StoredTensor(storage, int(offset), sizes, steps)


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "collections" and name == "OrderedDict":
            return OrderedDict
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor"):
            return _rebuild_tensor
        if module == "torch._utils" and name == "_rebuild_parameter":
            return _rebuild_parameter
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no state dict needs")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key = pid[0], pid[1], pid[2]
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise pickle.UnpicklingError(f"it holds a persistent object of kind {kind!r}")
        return _Storage(dtype, str(key))


class TorchFile:
    """One open ``.bin`` file of tensors.

    Raises
    ------
    CheckpointError
        If the file is missing, cut, of the format before torch 1.6, or holds more than tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self._entries = {info.filename: info for info in archive.infolist()}
                pickles = [name for name in self._entries if name.endswith("/data.pkl")]
                if len(pickles) != 1:
                    raise CheckpointError(f"{path}: no data.pkl inside: not a torch checkpoint")
                self._root = pickles[0].removesuffix("data.pkl")
                with archive.open(pickles[0]) as file:
                    state = _Unpickler(file).load()
        except OSError as problem:
            raise CheckpointError(f"{path}: cannot be opened: {problem.strerror}") from None
        except zipfile.BadZipFile:
            raise CheckpointError(
                f"{path}: not a zip archive of torch: it is cut (download it again) "
                "or older than torch 1.6 (save it again)"
            ) from None
        except CheckpointError:
            raise
        except Exception as problem:  # a damaged pickle may raise almost anything
            raise CheckpointError(f"{path}: the pickle is refused: {problem}") from None
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a dictionary of tensors")
        state = state.get("state_dict", state)
        self._tensors = {name: t for name, t in state.items() if isinstance(t, _StoredTensor)}
        self._data = np.memmap(path, dtype=np.uint8, mode="r")

    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._tensors[name].shape

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows ``start .. stop - 1`` of a tensor in its own dtype, a view of the file where possible."""
        tensor = self._tensors[name]
        flat = self._storage(name, tensor.storage)
        extent = (
            tensor.offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=True)) + 1
        )
        if 0 in tensor.shape or extent > len(flat):
            raise CheckpointError(f"{self.path}: tensor {name} reaches beyond its storage")
        strides = [s * flat.itemsize for s in tensor.stride]
        view = np.lib.stride_tricks.as_strided(flat[tensor.offset :], tensor.shape, strides, writeable=False)
        return view[start:stop]

    def _storage(self, name: str, storage: _Storage) -> np.ndarray:
        info = self._entries.get(f"{self._root}data/{storage.key}")
        if info is None or info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{self.path}: the storage of tensor {name} is missing or compressed")
        # The local header repeats the name and has an "extra" field of its own length.
        fixed = bytes(self._data[info.header_offset : info.header_offset + 30])
        if fixed[:4] != b"PK\x03\x04":
            raise CheckpointError(f"{self.path}: the storage of tensor {name} is not where the archive says")
        name_size, extra_size = struct.unpack("<HH", fixed[26:30])
        begin = info.header_offset + 30 + name_size + extra_size
        data = self._data[begin : begin + info.file_size]
        data = data[: len(data) // storage.dtype.itemsize * storage.dtype.itemsize]
        if begin % storage.dtype.itemsize:
            data = data.copy()
        return data.view(storage.dtype)

    def storage(self, name: str) -> str:
        """The storage that keeps a matrix: its dtype, float16 for bfloat16."""
        return "float32" if self._tensors[name].storage.dtype in (np.float32, np.float64) else "float16"

    def packed(self, name: str, start: int, stop: int) -> NoReturn:
        """No tensor here has codes."""
        raise AssertionError(f"{name} is stored in floats")

    def close(self) -> None:
        """Drop the mapping; arrays read from it stay valid."""
        del self._data
