"""MLC's format of converted weights: ``params_shard_{i}.bin`` files and ``tensor-cache.json``.

Tensors lie one after another in the shards, as their raw bytes; the JSON file names shard, offset,
shape and dtype of each. Shards hold at most 32 MiB, except that a larger tensor has one to itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from kvq.config import read_json
from kvq.errors import CheckpointError

CACHE_NAME = "tensor-cache.json"
#: The name that older versions of the format used.
OLD_CACHE_NAME = "ndarray-cache.json"
SHARD_BYTES = 32 << 20


class TensorCacheWriter:
    """Writes converted weights, tensor by tensor, into ``directory``.

    Shards are written into a temporary directory inside it and renamed into place by :meth:`finish`, the
    JSON file last; leaving the ``with`` block without that removes them and leaves earlier files whole.

    Raises
    ------
    CheckpointError
        If the directory cannot be made or written to, or the disk is full.
    """

    def __init__(self, directory: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.directory = Path(directory)
        self._shard_bytes = shard_bytes
        self._temporary = self.directory / f".params.{os.getpid()}.tmp"
        self._shards: list[dict[str, Any]] = []
        self._shard: _Shard | None = None
        self._num_values = 0
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._temporary.mkdir()
        except OSError as problem:
            raise self._cannot_write(problem) from None

    def add(self, name: str, array: np.ndarray, num_values: int | None = None) -> None:
        """Append one tensor.

        Parameters
        ----------
        name : str
            Its name in the compiled library.
        array : numpy.ndarray
            float32, float16, or uint32 codes.
        num_values : int, optional
            Weights that the array stands for (for the bits per weight in the file); its own size if not
            given, 0 for scales.
        """
        if array.dtype.name not in ("float32", "float16", "uint32"):
            raise ValueError(f"{name}: dtype {array.dtype} is not written")
        data = np.ascontiguousarray(array).data.cast("B")
        if self._shard and self._shard.nbytes + data.nbytes > self._shard_bytes:
            self._close_shard()
        self._num_values += array.size if num_values is None else num_values
        record = {"name": name, "shape": list(array.shape), "dtype": array.dtype.name, "format": "raw"}
        try:
            if self._shard is None:
                self._shard = _Shard(self._temporary / f"params_shard_{len(self._shards)}.bin")
            self._shard.append(record, data)
        except OSError as problem:
            raise self._cannot_write(problem) from None

    def finish(self) -> int:
        """Write what is pending, move everything into place, and return the bytes of all tensors."""
        self._close_shard()
        num_bytes = sum(shard["nbytes"] for shard in self._shards)
        content = {
            "metadata": {
                "ParamSize": sum(len(shard["records"]) for shard in self._shards),
                "ParamBytes": num_bytes,
                "BitsPerParam": num_bytes * 8 / max(self._num_values, 1),
            },
            "records": self._shards,
        }
        try:
            with open(self._temporary / CACHE_NAME, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=2)
            self._move_into_place()
        except OSError as problem:
            raise self._cannot_write(problem) from None
        return num_bytes

    def _move_into_place(self) -> None:
        # While shards are replaced there is no JSON file, so that no mixture of old and new can be read.
        for old in (CACHE_NAME, OLD_CACHE_NAME):
            (self.directory / old).unlink(missing_ok=True)
        for shard in self._shards:
            os.replace(self._temporary / shard["dataPath"], self.directory / shard["dataPath"])
        os.replace(self._temporary / CACHE_NAME, self.directory / CACHE_NAME)
        self._temporary.rmdir()
        written = {shard["dataPath"] for shard in self._shards}
        for stale in self.directory.glob("params_shard_*.bin"):
            if stale.name not in written:
                stale.unlink()

    def _close_shard(self) -> None:
        if self._shard is None:
            return
        try:
            self._shards.append(self._shard.close())
        except OSError as problem:
            raise self._cannot_write(problem) from None
        self._shard = None

    def _cannot_write(self, problem: OSError) -> CheckpointError:
        return CheckpointError(f"{self.directory}: cannot be written: {problem.strerror}")

    def __enter__(self) -> TensorCacheWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shard is not None:
            self._shard.abandon()
        shutil.rmtree(self._temporary, ignore_errors=True)


class _Shard:
    """A shard that is being written: its file, its sum, and what it holds so far."""

    def __init__(self, path: Path) -> None:
        self.nbytes = 0
        self._name = path.name
        self._file = open(path, "wb")  # noqa: SIM115 (closed by close or abandon)
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._records: list[dict[str, Any]] = []

    def append(self, record: dict[str, Any], data: memoryview) -> None:
        self._file.write(data)
        self._md5.update(data)
        self._records.append({**record, "nbytes": data.nbytes, "byteOffset": self.nbytes})
        self.nbytes += data.nbytes

    def close(self) -> dict[str, Any]:
        """Finish the file, and return its record in ``tensor-cache.json``."""
        self._file.close()
        return {
            "dataPath": self._name,
            "format": "raw-shard",
            "nbytes": self.nbytes,
            "records": self._records,
            "md5sum": self._md5.hexdigest(),
        }

    def abandon(self) -> None:
        # Closing writes what is buffered, which fails again where the disk is full.
        with contextlib.suppress(OSError):
            self._file.close()


class TensorCache:
    """Converted weights of a directory, mapped and not copied.

    Attributes
    ----------
    names : list of str
        The tensors, in the order in which they were written.

    Raises
    ------
    CheckpointError
        If the JSON file is missing or damaged, or a shard is missing or of another size than it says.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.path = self.directory / CACHE_NAME
        if not self.path.exists():
            self.path = self.directory / OLD_CACHE_NAME
        if not self.path.exists():
            raise CheckpointError(f"{self.directory}: no {CACHE_NAME}: run kvq convert_weight first")
        content = read_json(self.path, CheckpointError)
        self._maps: dict[str, np.ndarray] = {}
        self._records: dict[str, tuple[str, dict[str, Any]]] = {}
        try:
            self._shards = {str(s["dataPath"]): s for s in content["records"]}
            for shard in self._shards.values():
                self._check_shard(shard)
        except (KeyError, TypeError, AttributeError) as problem:
            raise CheckpointError(
                f"{self.path}: not a table of tensors: {problem} is missing or wrong"
            ) from None

    def _check_shard(self, shard: dict[str, Any]) -> None:
        path = self.directory / Path(shard["dataPath"]).name
        try:
            size = path.stat().st_size
        except OSError:
            raise CheckpointError(f"{path}: this shard is named in {self.path.name} but is missing") from None
        if size != shard["nbytes"]:
            raise CheckpointError(
                f"{path}: has {size} bytes, {self.path.name} says {shard['nbytes']}: "
                "convert the weights again"
            )
        for record in shard["records"]:
            name, end = record["name"], record["byteOffset"] + record["nbytes"]
            if record["byteOffset"] < 0 or end > size:
                raise CheckpointError(f"{self.path}: tensor {name} reaches beyond the end of {path.name}")
            if record["format"] == "raw":
                need = math.prod(record["shape"]) * np.dtype(record["dtype"]).itemsize
                if need != record["nbytes"]:
                    raise CheckpointError(
                        f"{self.path}: tensor {name} has {record['nbytes']} bytes, its shape needs {need}"
                    )
            self._records[name] = (shard["dataPath"], record)

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in the order in which they were written."""
        return list(self._records)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(record["nbytes"] for _, record in self._records.values())

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype name of a tensor."""
        record = self._record(name)[1]
        return tuple(record["shape"]), str(record["dtype"])

    def read(self, name: str) -> np.ndarray:
        """A tensor as a read-only view of its shard.

        Raises
        ------
        CheckpointError
            If there is no such tensor.
        """
        shard, record = self._record(name)
        if shard not in self._maps:
            path = self.directory / Path(shard).name
            self._maps[shard] = np.memmap(path, dtype=np.uint8, mode="r")
        data = self._maps[shard][record["byteOffset"] : record["byteOffset"] + record["nbytes"]]
        if record["format"] == "f32-to-bf16" and record["dtype"] == "float32":
            # MLC-LLM may store float32 tensors as the upper halves of their values.
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(record["shape"])
        return data.view(np.dtype(record["dtype"])).reshape(record["shape"])

    def _record(self, name: str) -> tuple[str, dict[str, Any]]:
        if name not in self._records:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        return self._records[name]

    def verify(self) -> None:
        """Compare every shard with its MD5 sum.

        Raises
        ------
        CheckpointError
            If one differs.
        """
        for name, shard in self._shards.items():
            digest = hashlib.md5(usedforsecurity=False)
            with open(self.directory / Path(name).name, "rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
            if digest.hexdigest() != shard.get("md5sum"):
                raise CheckpointError(f"{self.directory / name}: its MD5 sum differs from {self.path.name}")
