"""Reads GGUF files: metadata, the table of tensors, and rows of a tensor dequantized on demand.

The header is parsed here and not by the ``gguf`` package's reader, which maps every string of the
vocabulary separately and takes seconds for it. Block formats and their dequantization are the package's.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import CheckpointError
from kvq.loader.gguf_blocks import packed_rows
from kvq.quantization.storage import PackedRows

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: A header that claims more is damaged; the largest real ones have a few thousand.
_MAX_ENTRIES = 1 << 24
_MAX_RANK = 8


@dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]
    kind: str
    offset: int
    block_bytes: int
    nbytes: int


class GGUFFile:
    """One open GGUF file.

    Attributes
    ----------
    path : Path
        The file.
    metadata : dict
        Key to value: numbers, strings, or lists of them.

    Raises
    ------
    CheckpointError
        If the file cannot be opened, is not GGUF, is cut, or holds a block format that is not known.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._tensors: dict[str, _Tensor] = {}
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as problem:
            raise CheckpointError(f"{path}: cannot be opened: {problem.strerror}") from None
        except ValueError:
            raise CheckpointError(f"{path}: the file is empty") from None
        self._pos = 0
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError):
            raise CheckpointError(
                f"{path}: the GGUF header is damaged or cut at byte {self._pos}: download the file again"
            ) from None

    # ---- header --------------------------------------------------------------------------------
    def _scalar(self, code: str) -> Any:
        size = struct.calcsize(code)
        value = struct.unpack_from("<" + code, self._map, self._pos)[0]
        self._pos += size
        return value

    def _string(self) -> str:
        size = self._scalar("Q")
        if size > len(self._map) - self._pos:
            raise struct.error
        data = self._map[self._pos : self._pos + size]
        self._pos += size
        return data.decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._scalar("I"), self._scalar("Q")
            if item in _SCALARS:
                code = f"{count}{_SCALARS[item]}"
                if struct.calcsize("<" + code) > len(self._map) - self._pos:
                    raise struct.error
                values = list(struct.unpack_from("<" + code, self._map, self._pos))
                self._pos += struct.calcsize("<" + code)
                return values
            if count > len(self._map):
                raise struct.error
            return [self._value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise struct.error
        return self._scalar(_SCALARS[kind])

    def _parse(self) -> None:
        if self._map[:4] != _MAGIC:
            raise CheckpointError(f"{self.path}: not a GGUF file")
        self._pos = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise CheckpointError(f"{self.path}: GGUF version {version} is not supported: use version 2 or 3")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        if max(num_tensors, num_keys) > _MAX_ENTRIES:
            raise struct.error
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        table = [self._tensor_entry() for _ in range(num_tensors)]
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align <= 0:
            raise struct.error
        data_start = -(-self._pos // align) * align
        for name, dims, type_id, offset in table:
            self._tensors[name] = self._describe(name, dims, type_id, data_start + offset)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, rank = self._string(), self._scalar("I")
        if rank > _MAX_RANK:
            raise struct.error
        dims = tuple(self._scalar("Q") for _ in range(rank))
        return name, dims, self._scalar("I"), self._scalar("Q")

    def _describe(self, name: str, dims: tuple[int, ...], type_id: int, offset: int) -> _Tensor:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(type_id)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise CheckpointError(f"{self.path}: tensor {name} has the unknown type {type_id}") from None
        if not dims or dims[0] % block:
            raise CheckpointError(f"{self.path}: tensor {name} has a row of no whole blocks: shape {dims}")
        nbytes = math.prod(dims) // block * block_bytes
        if offset + nbytes > len(self._map):
            raise CheckpointError(
                f"{self.path}: the file is cut: tensor {name} ends at byte {offset + nbytes}, "
                f"the file has {len(self._map)}: download it again"
            )
        return _Tensor(tuple(reversed(dims)), kind.name, offset, block_bytes, nbytes)

    # ---- tensors -------------------------------------------------------------------------------
    def names(self) -> list[str]:
        """Names of the tensors as the file spells them."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape, outermost axis first (GGUF itself writes the innermost first)."""
        return self._tensors[name].shape

    def kind(self, name: str) -> str:
        """Type of a tensor, as GGUF names it: ``F32``, ``Q4_K`` and so on."""
        return self._tensors[name].kind

    def read(self, name: str, rows: np.ndarray | slice) -> np.ndarray:
        """The given rows as float32, or as stored for float32 and float16; all axes but the last are rows."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        vector = len(tensor.shape) == 1
        raw = self._raw(tensor).reshape(1, -1) if vector else self._rows(tensor, rows)
        if tensor.kind == "F32":
            out = raw.view(np.float32)
        elif tensor.kind == "F16":
            out = raw.view(np.float16)
        else:
            try:
                out = dequantize(raw, GGMLQuantizationType[tensor.kind])
            except NotImplementedError:
                raise CheckpointError(
                    f"{self.path}: tensor {name} is {tensor.kind}, which cannot be dequantized"
                ) from None
        return out.reshape(-1)[rows] if vector else out

    def packed(self, name: str, rows: np.ndarray | slice) -> PackedRows:
        """The given rows of a quantized matrix, codes apart from scales."""
        tensor = self._tensors[name]
        return packed_rows(self._rows(tensor, rows), tensor.kind, tensor.block_bytes)

    def _raw(self, tensor: _Tensor) -> np.ndarray:
        return np.frombuffer(self._map, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)

    def _rows(self, tensor: _Tensor, rows: np.ndarray | slice) -> np.ndarray:
        return self._raw(tensor).reshape(math.prod(tensor.shape[:-1]), -1)[rows]

    def close(self) -> None:
        """Close the file; arrays read from it stay valid."""
        # Views of the map keep it alive, and closing it under them is an error: drop our reference.
        del self._map
