"""One face for every kind of checkpoint: a configuration, and tensors by their Hugging Face names."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np

from kvq.config import ModelConfig, read_json
from kvq.errors import CheckpointError
from kvq.loader.gguf_model import GGUFModel
from kvq.loader.group_quantized import GroupQuantization, GroupQuantizedFiles
from kvq.loader.hf_config import model_config_from_hf
from kvq.loader.safetensors_file import SafetensorsFile
from kvq.loader.text_part import TextPart, text_config
from kvq.loader.torch_bin import TorchFile
from kvq.quantization.storage import STORAGES, PackedRows

#: Checkpoints up to this size are hashed whole for the fingerprint, larger ones by samples.
_HASH_WHOLE = 1 << 30
_SAMPLE = 1 << 20


class TensorFile(Protocol):
    """A file of named tensors: what each format's reader offers."""

    def names(self) -> list[str]:
        """Names of the tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows ``start .. stop - 1`` of a tensor."""

    def storage(self, name: str) -> str:
        """How a matrix is kept without loss, a key of :data:`~kvq.quantization.storage.STORAGES`."""

    def packed(self, name: str, start: int, stop: int) -> PackedRows:
        """Rows of a matrix whose storage has codes."""

    def close(self) -> None:
        """Close the file."""


class Checkpoint:
    """An open checkpoint. Tensors are read when asked for, by rows if wanted.

    Attributes
    ----------
    path : Path
        The Hugging Face directory, or the GGUF file.
    config : ModelConfig
        The architecture, normalized.
    files : list of Path
        Every file that the content depends on (configuration and weights).
    gguf : GGUFModel or None
        The model file, where the checkpoint is GGUF: its metadata also holds the tokenizer.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        files: list[Path],
        tensor_files: dict[Path, TensorFile],
        gguf: GGUFModel | None = None,
    ) -> None:
        self.path = path
        self.config = config
        self.files = files
        self.gguf = gguf
        self._tensor_files = tensor_files
        self._where = {name: file for file, reader in tensor_files.items() for name in reader.names()}
        self._alias = {}
        embed, head = "model.embed_tokens.weight", "lm_head.weight"
        if config.tie_word_embeddings and embed not in self._where and head in self._where:
            self._alias[embed] = head  # writers that drop duplicates may keep either of the two names

    def tensor_names(self) -> list[str]:
        """Names of all tensors, as Hugging Face spells them."""
        return [*self._where, *self._alias]

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor.

        Raises
        ------
        CheckpointError
            If no file does.
        """
        name = self._alias.get(name, name)
        if name not in self._where:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        return self._where[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, ``(out, in)`` for a matrix."""
        return self._tensor_files[self.file_of(name)].shape(self._alias.get(name, name))

    def tensor(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """A tensor, or rows ``start .. stop - 1`` of it.

        Returns
        -------
        numpy.ndarray
            In the dtype of the file: float32, float16, bfloat16 (``ml_dtypes``); float32 for the
            quantized types of GGUF. Read-only where it is a view of the file.

        Raises
        ------
        CheckpointError
            If the tensor is missing or cannot be read.
        """
        rows = self.shape(name)[0] if self.shape(name) else 1
        reader = self._tensor_files[self.file_of(name)]
        return reader.read(self._alias.get(name, name), start, rows if stop is None else min(stop, rows))

    def storage(self, name: str) -> str:
        """How a matrix is kept as it is, a key of :data:`~kvq.quantization.storage.STORAGES`.

        bfloat16 is kept as float16: exact from 6e-5 to 65504, and off by at most 3e-8 below.
        """
        return self._tensor_files[self.file_of(name)].storage(self._alias.get(name, name))

    def packed(self, name: str, start: int = 0, stop: int | None = None) -> PackedRows:
        """Codes and scales of rows of a matrix whose storage has codes.

        Raises
        ------
        CheckpointError
            If the tensor is missing.
        """
        reader = self._tensor_files[self.file_of(name)]
        rows = self.shape(name)[0]
        return reader.packed(self._alias.get(name, name), start, rows if stop is None else min(stop, rows))

    @property
    def has_codes(self) -> bool:
        """Whether any matrix is stored in codes: then ``--quantization source`` is the default."""
        return any(
            STORAGES[self.storage(name)].bits is not None
            for name in self.tensor_names()
            if len(self.shape(name)) > 1
        )

    def fingerprint(self) -> str:
        """A hash of the checkpoint, to name what was built from it.

        Up to 1 GiB every byte is hashed. Of larger checkpoints: size, modification time, the first and
        last MiB and 14 MiB between them of each file, so a file changed in place has another hash (its
        time differs), and so may an identical copy.
        """
        digest = hashlib.sha256()
        whole = sum(file.stat().st_size for file in self.files) <= _HASH_WHOLE
        for path in sorted(self.files):
            stat = path.stat()
            digest.update(f"{path.name}:{stat.st_size}\n".encode())
            with open(path, "rb") as file:
                if whole or stat.st_size <= 16 * _SAMPLE:
                    while chunk := file.read(8 * _SAMPLE):
                        digest.update(chunk)
                    continue
                digest.update(str(stat.st_mtime_ns).encode())
                for i in range(16):
                    file.seek((stat.st_size - _SAMPLE) * i // 15)
                    digest.update(file.read(_SAMPLE))
        return digest.hexdigest()

    def close(self) -> None:
        """Close all files."""
        for reader in self._tensor_files.values():
            reader.close()
        self._tensor_files = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face directory, a ``.gguf`` file, or a directory with exactly one ``.gguf`` file.

    Raises
    ------
    CheckpointError
        If there is nothing to read there, or a file is missing, cut or damaged.
    ConfigError
        If the architecture is unknown or its configuration is contradictory.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path}: expected a .gguf file or a Hugging Face directory")
        return _open_gguf(path)
    if (path / "config.json").exists():
        return _open_directory(path)
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return _open_gguf(found[0])
    if found:
        raise CheckpointError(f"{path}: {len(found)} .gguf files: name the one to use")
    raise CheckpointError(f"{path}: no config.json and no .gguf file in this directory")


def _open_gguf(path: Path) -> Checkpoint:
    model = GGUFModel(path)
    return Checkpoint(path, model.config, [path], {path: model}, model)


def _open_directory(path: Path) -> Checkpoint:
    config_path = path / "config.json"
    data = read_json(config_path, CheckpointError)
    if not isinstance(data, dict):
        raise CheckpointError(f"{config_path}: expected a JSON object")
    text = text_config(data)
    config = model_config_from_hf(text or data, config_path)
    quantization = data.get("quantization_config")
    how = GroupQuantization.parse(quantization, config_path) if quantization else None
    shards, index = _shards(path)
    readers: dict[Path, TensorFile] = {}
    for shard in shards:
        readers[shard] = SafetensorsFile(shard) if shard.suffix == ".safetensors" else TorchFile(shard)
    if how is not None:
        readers = {path: _quantized(path, list(readers.values()), how)}
    if text is not None:
        readers = {file: TextPart(reader) for file, reader in readers.items()}
    files = [config_path, *([index] if index else []), *shards]
    return Checkpoint(path, config, files, readers)


def _quantized(path: Path, files: list[TensorFile], how: GroupQuantization) -> GroupQuantizedFiles:
    """The files of a checkpoint that AWQ or GPTQ quantized."""
    found = [file for file in files if isinstance(file, SafetensorsFile)]
    if len(found) < len(files):
        raise CheckpointError(f"{path}: {how.method} is read from safetensors alone: convert the .bin files")
    return GroupQuantizedFiles(path, found, how)


def _shards(path: Path) -> tuple[list[Path], Path | None]:
    """The weight files of a directory, and the index that names them if there is one."""
    for pattern, index_name in (
        ("*.safetensors", "model.safetensors.index.json"),
        ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
        ("*.pt", "pytorch_model.pt.index.json"),
    ):
        index = path / index_name
        if index.exists():
            content = read_json(index, CheckpointError)
            weight_map = content.get("weight_map") if isinstance(content, dict) else None
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{index}: no weight_map")
            shards = [path / name for name in sorted(set(weight_map.values()))]
            for shard in shards:
                if not shard.exists():
                    raise CheckpointError(f"{shard}: this shard is named in {index_name} but is missing")
            return shards, index
        found = sorted(path.glob(pattern))
        if len(found) > 1 and (path / "model.safetensors") in found:
            found = [path / "model.safetensors"]
        if found:
            _refuse_incomplete(found, path)
            return found, None
    raise CheckpointError(f"{path}: no *.safetensors, pytorch_model*.bin or *.pt in this directory")


def _refuse_incomplete(found: list[Path], path: Path) -> None:
    """Refuse shards named ``-00001-of-00002`` of which some are absent (there is no index to tell)."""
    for file in found:
        _, separator, total = file.stem.rpartition("-of-")
        if separator and total.isdigit() and int(total) != len(found):
            raise CheckpointError(f"{path}: {len(found)} of {int(total)} shards are here: download the rest")
