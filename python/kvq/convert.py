"""``convert_weight``: a checkpoint into the weights directory of a scheme, streaming tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvq.errors import CheckpointError
from kvq.loader.check import check_tensors
from kvq.loader.checkpoint import Checkpoint, open_checkpoint
from kvq.loader.tensor_cache import TensorCacheWriter
from kvq.model.parameters import Parameter, model_parameters
from kvq.quantization.scheme import WeightScheme, resolve
from kvq.quantization.storage import STORAGES
from kvq.quantization.weights import quantize_q4f16_1, stored_parameters, stored_tensors

#: Values converted at a time: bounds the float32 copies that conversion needs.
_BLOCK_VALUES = 1 << 20

#: Called after each parameter with how many are done, how many there are, and its name.
Progress = Callable[[int, int, str], None]


def convert_weight(
    model: str | Path, quantization: str, output: str | Path, *, progress: Progress | None = None
) -> int:
    """Convert the weights of a checkpoint and write ``params_shard_*.bin`` and ``tensor-cache.json``.

    Parameters
    ----------
    model : str or Path
        A Hugging Face directory or a ``.gguf`` file.
    quantization : str
        A weight scheme, or an alias of one (``q4f16kv`` has the weights of ``q4f16_1``).
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
    scheme, _ = resolve(quantization)
    with open_checkpoint(model) as checkpoint:
        stored_parameters(checkpoint.config, scheme)  # refuses shapes that the scheme cannot store
        parameters = model_parameters(checkpoint.config)
        check_tensors(checkpoint, parameters)
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
        for source, row, block in _blocks(checkpoint, parameter):
            for array, part in zip(arrays, quantize_q4f16_1(block, source), strict=True):
                array[row : row + len(block)] = part
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


def _blocks(checkpoint: Checkpoint, parameter: Parameter) -> Iterator[tuple[str, int, np.ndarray]]:
    """Blocks of rows of a parameter: the source tensor, the row in the fused parameter, the values."""
    row_values = max(1, int(np.prod(parameter.shape[1:])))
    step = max(1, _BLOCK_VALUES // row_values)
    row = 0
    for source in parameter.sources:
        num_rows = checkpoint.shape(source)[0]
        for start in range(0, num_rows, step):
            block = checkpoint.tensor(source, start, start + step)
            yield source, row + start, block if not parameter.offset else block + np.float32(parameter.offset)
        row += num_rows
