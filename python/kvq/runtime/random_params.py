"""Weights made up on the device: the speed of a model's shape, without its files.

What a kernel reads decides how long it takes, hardly what the numbers are. Activations stay within fp16.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tvm

from kvq.runtime.library import Library, Params, nbytes

#: Bytes that repeat in every tensor.
_BLOCK_BYTES = 32 << 20
_HALVES = ("float16", "bfloat16")
#: Standard deviation of weights, and the largest scale of codes, whose weights then are about as large.
_DEVIATION, _SCALE = 0.02, 0.008


def random_params(library: Library, seed: int = 0) -> Params:
    """Parameters of the library's shapes and types, filled on its device.

    Raises
    ------
    RuntimeError
        If the device has not the memory.
    """
    rng = np.random.default_rng(seed)
    raw = {spec.name: spec for spec in library.metadata.raw_params}
    handle = library.device.handle
    weights = rng.standard_normal(_BLOCK_BYTES // 2, np.float32) * np.float32(_DEVIATION)
    scales = rng.random(_BLOCK_BYTES // 2, np.float32) * np.float32(_SCALE)
    blocks = {
        "uint32": rng.integers(0, 2**32, _BLOCK_BYTES // 4, np.uint32),
        "float32": weights[: _BLOCK_BYTES // 4],
        **{dtype: weights.astype(dtype) for dtype in _HALVES},
        **{f"scales in {dtype}": scales.astype(dtype) for dtype in _HALVES},
    }
    on_device = {name: tvm.runtime.tensor(block.view(np.uint32), handle) for name, block in blocks.items()}
    made: dict[tuple[str | None, tuple[str, ...]], Any] = {}
    for spec in library.metadata.params:
        key = (spec.function, spec.inputs)
        if key in made:
            continue
        stored = raw[spec.inputs[0]]
        if len(spec.shape) == 1:
            made[key] = tvm.runtime.tensor(np.ones(spec.shape, spec.dtype), handle)
            continue
        codes = any(
            other.name != stored.name and _stem(other.name) == _stem(stored.name) for other in raw.values()
        )
        # tensor cores have halves in the type of activations, whatever words hold them
        halves = library.metadata.activations if spec.function else stored.dtype
        kind = halves if stored.dtype == "float16" and halves in _HALVES else stored.dtype
        kind = f"scales in {kind}" if kind in _HALVES and codes else kind
        made[key] = tvm.runtime.empty(spec.shape, spec.dtype, handle)
        _fill(made[key], on_device[kind])
    library.device.synchronize()
    return Params([made[spec.function, spec.inputs] for spec in library.metadata.params])


def _stem(name: str) -> str:
    """The weight that a stored tensor belongs to."""
    return name.rpartition(".")[0]


def _fill(tensor: Any, block: Any) -> None:
    """Repeat the block in the tensor."""
    size = nbytes(tensor)
    width = size // math.prod(tensor.shape)
    for start in range(0, size, _BLOCK_BYTES):
        count = min(_BLOCK_BYTES, size - start)
        target = tensor._create_view((count // width,), relative_byte_offset=start)
        target.copyfrom(block._create_view((count // width,), dtype=tensor.dtype))
