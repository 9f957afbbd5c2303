"""``convert_weight``: a checkpoint into the weights directory of a scheme, streaming tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvq.errors import CheckpointError
from kvq.loader.check import check_tensors
from kvq.loader.checkpoint import Checkpoint, open_checkpoint
from kvq.loader.source import resolve_for
from kvq.loader.tensor_cache import TensorCacheWriter
from kvq.model.parameters import Parameter, model_parameters
from kvq.quantization.scheme import WeightScheme
from kvq.quantization.storage import STORAGES, pack_codes
from kvq.quantization.weights import quantize_q4f16_1, stored_parameters, stored_tensors

#: Values converted at a time: bounds the float32 copies that conversion needs.
_BLOCK_VALUES = 1 << 20

#: Called after each parameter with how many are done, how many there are, and its name.
Progress = Callable[[int, int, str], None]


def convert_weight(
    model: str | Path, quantization: str | None, output: str | Path, *, progress: Progress | None = None
) -> int:
    """Convert the weights of a checkpoint and write ``params_shard_*.bin`` and ``tensor-cache.json``.

    Parameters
    ----------
    model : str or Path
        A Hugging Face directory or a ``.gguf`` file.
    quantization : str or None
        A weight scheme, or an alias of one (``q4f16kv`` has the weights of ``q4f16_1``); None for what the
        checkpoint becomes by default.
    output : str or Path
        The directory to write to. Earlier weights in it are replaced once all new ones are written.
    progress : callable, optional
        Told of every finished parameter.

    Returns
    -------
    int
        Bytes of the converted weights.

    Raises
    ------
    KvqError
        If the checkpoint, the scheme or the directory does not serve.
    """
    with open_checkpoint(model) as checkpoint:
        parameters = model_parameters(checkpoint.config)
        check_tensors(checkpoint, parameters)
        scheme, _ = resolve_for(checkpoint, quantization, None)
        stored_parameters(checkpoint.config, scheme)  # refuses shapes that the scheme cannot store
        with TensorCacheWriter(output) as writer:
            for done, parameter in enumerate(parameters, 1):
                _write(writer, checkpoint, parameter, scheme)
                if progress:
                    progress(done, len(parameters), parameter.name)
            return writer.finish()


def _write(
    writer: TensorCacheWriter, checkpoint: Checkpoint, parameter: Parameter, scheme: WeightScheme
) -> None:
    """Fuse, cast and quantize one parameter block of rows by block, and write it."""
    storage = scheme.storage(parameter.name, parameter.quantize)
    stored = stored_tensors(parameter.name, parameter.shape, storage)
    if STORAGES[storage].bits is not None:
        arrays = [np.empty(tensor.shape, tensor.dtype) for tensor in stored]
        keep = scheme.matrices is None
        for row, parts in (_kept if keep else _quantized)(checkpoint, parameter, storage):
            for array, part in zip(arrays, parts, strict=True):
                array[row : row + len(part)] = part
        for tensor, array in zip(stored, arrays, strict=True):
            writer.add(tensor.name, array, math.prod(parameter.shape) if array is arrays[0] else 0)
        return
    out = np.empty(parameter.shape, storage)
    for source, row, block in _blocks(checkpoint, parameter):
        target = out[row : row + len(block)]
        with np.errstate(over="ignore"):
            target[...] = block.astype(storage)
        if not np.isfinite(target).all():
            raise CheckpointError(
                f"{checkpoint.file_of(source)}: tensor {source} holds NaN, infinity or a value "
                f"beyond the range of {storage}" + (": use q0f32" if storage == "float16" else "")
            )
    writer.add(parameter.name, out)


#: A row of a parameter, and the arrays of its storage from there on.
_Parts = tuple[int, tuple[np.ndarray, ...]]


def _quantized(checkpoint: Checkpoint, parameter: Parameter, _storage: str) -> Iterator[_Parts]:
    """Rows of a parameter in floats, quantized."""
    for source, row, block in _blocks(checkpoint, parameter):
        yield row, quantize_q4f16_1(block, source)


def _kept(checkpoint: Checkpoint, parameter: Parameter, storage: str) -> Iterator[_Parts]:
    """Rows of a parameter in codes, as they are."""
    bits = STORAGES[storage].bits
    assert bits is not None
    for source, row, start, stop in _spans(checkpoint, parameter):
        rows = checkpoint.packed(source, start, stop).widened(storage)
        scales = [rows.scale] if rows.offset is None else [rows.scale, rows.offset]
        if not all(np.isfinite(part).all() for part in scales):
            raise CheckpointError(
                f"{checkpoint.file_of(source)}: tensor {source} has a scale that is NaN, infinite or beyond "
                "the range of float16"
            )
        yield row, (pack_codes(rows.codes, bits), *scales)


def _blocks(checkpoint: Checkpoint, parameter: Parameter) -> Iterator[tuple[str, int, np.ndarray]]:
    """Blocks of rows of a parameter: the source tensor, the row in the fused parameter, the values."""
    for source, row, start, stop in _spans(checkpoint, parameter):
        block = checkpoint.tensor(source, start, stop)
        yield source, row, block if not parameter.offset else block + np.float32(parameter.offset)


def _spans(checkpoint: Checkpoint, parameter: Parameter) -> Iterator[tuple[str, int, int, int]]:
    """Blocks of rows: the source tensor, the row in the fused parameter, first and last row of the source."""
    row_values = max(1, int(np.prod(parameter.shape[1:])))
    step = max(1, _BLOCK_VALUES // row_values)
    row = 0
    for source in parameter.sources:
        num_rows = checkpoint.shape(source)[0]
        for start in range(0, num_rows, step):
            yield source, row + start, start, min(start + step, num_rows)
        row += num_rows
