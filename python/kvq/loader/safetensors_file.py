"""Reads one safetensors file: a JSON table of tensors, then their bytes, mapped and not copied."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from kvq.errors import CheckpointError

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_INTEGERS = {"I32": np.dtype(np.int32)}


def _end(entry: dict[str, Any]) -> int:
    """Where a tensor ends; ValueError or KeyError if its entry makes no sense."""
    begin, end = entry["data_offsets"]
    if not (isinstance(entry["dtype"], str) and 0 <= begin <= end and all(n >= 0 for n in entry["shape"])):
        raise ValueError
    return int(end)


class SafetensorsFile:
    """One open safetensors file.

    Raises
    ------
    CheckpointError
        If the file cannot be opened, its table is damaged, or the bytes do not fill what the table says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = file.read(length) if 2 <= length <= size - 8 else b""
            self._table = json.loads(header)
            self._table.pop("__metadata__", None)
            self._start = 8 + length
            end = max((_end(entry) for entry in self._table.values()), default=0)
        except OSError as problem:
            raise CheckpointError(f"{path}: cannot be opened: {problem.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise CheckpointError(
                f"{path}: the safetensors header is damaged or cut: download the file again"
            ) from None
        if self._start + end != size:
            raise CheckpointError(
                f"{path}: the file has {size} bytes, its header describes {self._start + end}: "
                "it is cut or damaged, download it again"
            )
        self._data = np.memmap(path, dtype=np.uint8, mode="r")

    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self._table)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._table[name]["shape"])

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows ``start .. stop - 1`` of a tensor in its own dtype, a view of the file."""
        return self._view(name, _DTYPES)[start:stop]

    def read_int32(self, name: str) -> np.ndarray:
        """A whole tensor of int32: codes that a quantizer packed."""
        return self._view(name, _INTEGERS)

    def _view(self, name: str, known: dict[str, np.dtype]) -> np.ndarray:
        entry = self._table[name]
        if entry["dtype"] not in known:
            raise CheckpointError(
                f"{self.path}: tensor {name} is {entry['dtype']}: only {', '.join(known)} can be read"
            )
        dtype = known[entry["dtype"]]
        begin, end = entry["data_offsets"]
        if end - begin != math.prod(entry["shape"]) * dtype.itemsize:
            raise CheckpointError(
                f"{self.path}: tensor {name} has {end - begin} bytes, its shape needs other"
            )
        data = self._data[self._start + begin : self._start + end]
        if (self._start + begin) % dtype.itemsize:
            data = data.copy()
        return data.view(dtype).reshape(entry["shape"])

    def storage(self, name: str) -> str:
        """The storage that keeps a matrix: its dtype, float16 for bfloat16."""
        return "float32" if self._table[name]["dtype"] in ("F32", "F64") else "float16"

    def packed(self, name: str, start: int, stop: int) -> NoReturn:
        """No tensor here has codes."""
        raise AssertionError(f"{name} is stored in floats")

    def close(self) -> None:
        """Drop the mapping; arrays read from it stay valid."""
        del self._data
