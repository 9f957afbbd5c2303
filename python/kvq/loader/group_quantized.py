"""Weights that AWQ or GPTQ quantized to 4 bits: integers, zero points and scales of groups of inputs.

A weight is ``(code - zero) * scale``. Both keep eight codes in an int32 and store matrices as ``[in, out]``:

- GPTQ packs codes along the inputs, zero points along the outputs; in its first format the stored zero is one
  less than the zero. ``g_idx`` names the group of each input.
- AWQ packs both along the outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import CheckpointError, ConfigError
from kvq.loader.safetensors_file import SafetensorsFile
from kvq.quantization.storage import GROUP, PackedRows

METHODS = ("awq", "gptq")
_STORAGE = "int4_zero"
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_PER_WORD = 8
#: Output of each field of a word, of eight.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class GroupQuantization:
    """How a checkpoint was quantized.

    Attributes
    ----------
    method : str
        ``awq`` or ``gptq``.
    group_size : int
        Inputs of a group; -1: all of them.
    zero_added : int
        What to add to a stored zero.
    """

    method: str
    group_size: int
    zero_added: int

    @classmethod
    def parse(cls, data: dict[str, Any], path: Path) -> GroupQuantization:
        """Read ``quantization_config``.

        Parameters
        ----------
        data : dict
            The value of that key.
        path : Path
            The file, for messages.

        Raises
        ------
        ConfigError
            If the method, or what it was told to do, is not supported.
        """
        method = data.get("quant_method")
        if method not in METHODS:
            raise ConfigError(
                f"{path}: the checkpoint is already quantized ({method or 'some method'}): use one of "
                f"{', '.join(METHODS)}, a GGUF file, or the original in float16, bfloat16 or float32"
            )
        if data.get("bits", data.get("w_bit")) != 4:
            raise ConfigError(f"{path}: {method} with other than 4 bits is not supported")
        version = str(data.get("version", "gemm")).lower()
        if method == "awq" and version != "gemm":
            raise ConfigError(f"{path}: awq of version {version!r} is not supported: use gemm")
        size = data.get("group_size", data.get("q_group_size", 128))
        if not isinstance(size, int) or not (size == -1 or (size > 0 and size % GROUP == 0)):
            raise ConfigError(f"{path}: group_size {size!r} is not supported: use a multiple of {GROUP}")
        first_format = data.get("checkpoint_format", "gptq") == "gptq"
        return cls(method, size, int(method == "gptq" and first_format))


class GroupQuantizedFiles:
    """The files of a checkpoint as one: quantized matrices by the names of the weights they stand for.

    Parameters
    ----------
    path : Path
        The directory, for messages.
    files : list of SafetensorsFile
        Its files.
    quantization : GroupQuantization
        How the matrices were quantized.

    Raises
    ------
    CheckpointError
        If a part of a matrix is missing, or parts do not fit together.
    """

    def __init__(self, path: Path, files: list[SafetensorsFile], quantization: GroupQuantization) -> None:
        self.path, self._files, self._quantization = path, files, quantization
        self._where = {name: file for file in files for name in file.names()}
        self._quantized = [name.removesuffix(".qweight") for name in self._where if name.endswith(".qweight")]
        for stem in self._quantized:
            self._check(stem)

    def _check(self, stem: str) -> None:
        for part in _PARTS[:3]:
            if f"{stem}.{part}" not in self._where:
                raise CheckpointError(f"{self.path}: tensor {stem}.{part} is missing")
        (k, n), groups = self._sizes(stem), self._groups(stem)
        expected = {
            "qweight": (k // _PER_WORD, n) if self._is_gptq else (k, n // _PER_WORD),
            "qzeros": (groups, n // _PER_WORD),
            "scales": (groups, n),
        }
        for part, shape in expected.items():
            found = self._where[f"{stem}.{part}"].shape(f"{stem}.{part}")
            if found != shape or n % _PER_WORD or k % GROUP or k % groups:
                raise CheckpointError(
                    f"{self.path}: tensor {stem}.{part} has shape {list(found)}, which does not fit "
                    f"{self._quantization.method} with groups of {self._quantization.group_size}"
                )

    @property
    def _is_gptq(self) -> bool:
        return self._quantization.method == "gptq"

    def _sizes(self, stem: str) -> tuple[int, int]:
        """Inputs and outputs of a matrix."""
        shape = self._where[f"{stem}.qweight"].shape(f"{stem}.qweight")
        if len(shape) != 2 or 0 in shape:
            raise CheckpointError(f"{self.path}: tensor {stem}.qweight has shape {list(shape)}")
        return (shape[0] * _PER_WORD, shape[1]) if self._is_gptq else (shape[0], shape[1] * _PER_WORD)

    def _groups(self, stem: str) -> int:
        size = self._quantization.group_size
        return 1 if size == -1 else max(1, self._sizes(stem)[0] // size)

    # ---- tensors -------------------------------------------------------------------------------
    def names(self) -> list[str]:
        """Names of the tensors, quantized ones as ``weight``."""
        parts = {f"{stem}.{part}" for stem in self._quantized for part in _PARTS}
        return [name for name in self._where if name not in parts] + [
            f"{stem}.weight" for stem in self._quantized
        ]

    def _stem(self, name: str) -> str | None:
        """The quantized matrix of this name, if it is one."""
        stem = name.removesuffix(".weight")
        return stem if f"{stem}.qweight" in self._where else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, ``(out, in)`` for a matrix."""
        stem = self._stem(name)
        if stem is None:
            return self._where[name].shape(name)
        k, n = self._sizes(stem)
        return n, k

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows ``start .. stop - 1``, as float32 where they are quantized."""
        stem = self._stem(name)
        if stem is None:
            return self._where[name].read(name, start, stop)
        codes, scale, zero = self._rows(stem, start, stop)
        group = self._group_of_inputs(stem)
        return (codes - zero[:, group]).astype(np.float32) * scale.astype(np.float32)[:, group]

    def storage(self, name: str) -> str:
        """The storage that keeps a matrix.

        Raises
        ------
        CheckpointError
            If its groups are scattered over the inputs.
        """
        stem = self._stem(name)
        if stem is None:
            return self._where[name].storage(name)
        inputs = np.arange(self._sizes(stem)[0])
        if not np.array_equal(self._group_of_inputs(stem), inputs // (len(inputs) // self._groups(stem))):
            raise CheckpointError(
                f"{self.path}: the groups of {stem} are scattered over the inputs (desc_act), which no "
                "storage keeps: use --quantization q0f16, or a checkpoint without desc_act"
            )
        return _STORAGE

    def packed(self, name: str, start: int, stop: int) -> PackedRows:
        """Rows of a matrix whose storage has codes."""
        stem = self._stem(name)
        assert stem is not None, f"{name} is stored in floats"
        codes, scale, zero = self._rows(stem, start, stop)
        repeat = codes.shape[1] // scale.shape[1] // GROUP
        scale, zero = (np.repeat(part, repeat, axis=1) for part in (scale, zero.astype(np.float16)))
        return PackedRows(_STORAGE, codes.astype(np.uint8), scale, zero)

    def _rows(self, stem: str, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes int16 ``[n, K]``, scales float16 and zeros int16 ``[n, groups]`` of some outputs."""
        words = self._integers(f"{stem}.qweight")
        codes = _along_inputs(words[:, start:stop]) if self._is_gptq else self._outputs(words, start, stop)
        zero = self._outputs(self._integers(f"{stem}.qzeros"), start, stop) + self._quantization.zero_added
        scales = self._where[f"{stem}.scales"]
        scale = scales.read(f"{stem}.scales", 0, self._groups(stem))[:, start:stop]
        with np.errstate(over="ignore"):
            return codes, np.ascontiguousarray(scale.T).astype(np.float16), zero

    def _outputs(self, words: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Fields of ``int32[m, N / 8]`` of some outputs: ``int16[n, m]``."""
        first = start // _PER_WORD
        fields = _fields(words[:, first : -(-stop // _PER_WORD)])
        if not self._is_gptq:
            fields = fields[:, :, np.argsort(_AWQ_ORDER)]
        fields = fields.reshape(len(words), -1)[:, start - first * _PER_WORD : stop - first * _PER_WORD]
        return np.ascontiguousarray(fields.T)

    def _group_of_inputs(self, stem: str) -> np.ndarray:
        """Group of each input."""
        k, groups = self._sizes(stem)[0], self._groups(stem)
        if f"{stem}.g_idx" not in self._where:
            return np.arange(k) // (k // groups)
        index = self._integers(f"{stem}.g_idx")
        if index.shape != (k,) or not (index.min() >= 0 and index.max() < groups):
            raise CheckpointError(f"{self.path}: tensor {stem}.g_idx names groups that there are not")
        return index

    def _integers(self, name: str) -> np.ndarray:
        return self._where[name].read_int32(name)

    def close(self) -> None:
        """Close all files."""
        for file in self._files:
            file.close()


def _fields(words: np.ndarray) -> np.ndarray:
    """The eight fields of 4 bits of each word, lowest first: ``int16[..., 8]``."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    return ((words.view(np.uint32)[..., None] >> shifts) & 15).astype(np.int16)


def _along_inputs(words: np.ndarray) -> np.ndarray:
    """Fields of ``int32[K / 8, n]``: ``int16[n, K]``."""
    columns = np.ascontiguousarray(words.T)
    return _fields(columns).reshape(len(columns), -1)
