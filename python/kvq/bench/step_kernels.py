"""The kernels of a decode step, as a compiled library launches them, kept to be launched again by themselves.

So what is measured is the library's own machine code on its own tensors, whatever the passes made one kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvq.errors import ConfigError
from kvq.runtime.library import nbytes
from kvq.runtime.loaded_model import LoadedModel

#: Names of kernels that multiply by one weight, with its outputs and inputs.
_PRODUCT = re.compile(r"linear_\w*?_(\d+)x(\d+)(?:_rows\d+)?$")


@dataclass(frozen=True)
class StepKernel:
    """A launch of a step.

    Attributes
    ----------
    name : str
        The kernel's, in the library.
    weight : str or None
        What it multiplies by, such as ``qkv_proj``; None if it is no product.
    shape : tuple of int
        Outputs and inputs of the weight; empty if it is no product.
    weight_bytes : int
        Bytes of the weight, which a product must read.
    function, arguments
        What is called.
    """

    name: str
    weight: str | None
    shape: tuple[int, ...]
    weight_bytes: int
    function: Callable[..., None]
    arguments: tuple[Any, ...] = ()

    def launch(self) -> None:
        """Put it on the current stream once more."""
        self.function(*self.arguments)


def record_step(model: LoadedModel, rows: int) -> list[StepKernel]:
    """Decode the first token of ``rows`` sequences, and return what that launched, in order.

    The kernels of the cache are left out: they would write it again. The tensors of the others live as long
    as what is returned; tensors that one kernel makes for another share memory with later ones.

    Raises
    ------
    ConfigError
        If the library was compiled for fewer rows, or the model has experts.
    """
    metadata = model.metadata
    if rows > metadata.max_batch_size:
        raise ConfigError(
            f"--rows {rows} exceeds the {metadata.max_batch_size} sequences that the library was compiled for"
        )
    if metadata.model.num_experts:
        raise ConfigError(
            f"{metadata.model_type}: what products with experts read depends on the rows: take another model"
        )
    cache = {tensor.data_ptr() for tensor in model.tensors.named.values()}
    weights = {
        tensor.data_ptr(): spec.name
        for tensor, spec in zip(model.params.handle, metadata.params, strict=True)
        if len(spec.shape) > 1
    }
    found = []

    def see(name: str, kernel: Any, arguments: tuple[Any, ...]) -> None:
        tensors = [argument for argument in arguments if hasattr(argument, "data_ptr")]
        if any(tensor.data_ptr() in cache for tensor in tensors):
            return
        product, weight, size = _PRODUCT.search(name), None, 0
        if product:
            parts = [tensor for tensor in tensors if tensor.data_ptr() in weights]
            weight = weights[parts[0].data_ptr()].split(".")[-2]
            size = sum(map(nbytes, parts))
        shape = tuple(map(int, product.groups())) if product else ()
        found.append(StepKernel(name, weight, shape, size, kernel, arguments))

    names = [f"row {i}" for i in range(rows)]
    for name in names:
        model.cache.add_sequence(name)
    try:
        with model.library.watched(see):
            model.step([(name, 1) for name in names], [0] * rows)
    finally:
        for name in names:
            model.cache.remove_sequence(name)
    return found
