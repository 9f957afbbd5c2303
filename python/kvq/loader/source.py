"""What ``--quantization source`` means for a checkpoint: how each of its matrices is kept."""

from __future__ import annotations

from kvq.loader.checkpoint import Checkpoint
from kvq.model.parameters import model_parameters
from kvq.quantization.scheme import DEFAULT_QUANTIZATION, SOURCE, KVQuantization, WeightScheme, resolve
from kvq.quantization.storage import join


def storage_table(checkpoint: Checkpoint) -> dict[str, str]:
    """The storage of each matrix of the library: what holds all of the tensors that it is made of.

    The tensors must be there (:func:`~kvq.loader.check.check_tensors`).
    """
    return {
        parameter.name: join(*(checkpoint.storage(source) for source in parameter.sources))
        for parameter in model_parameters(checkpoint.config)
        if parameter.quantize
    }


def resolve_for(
    checkpoint: Checkpoint, quantization: str | None, kv_quantization: str | None
) -> tuple[WeightScheme, KVQuantization]:
    """As :func:`~kvq.quantization.scheme.resolve`; the table of ``source`` is the checkpoint's.

    Without ``quantization``, a checkpoint whose weights are codes keeps them, with an int4 cache.
    """
    if quantization is None:
        keeps = checkpoint.has_codes
        quantization = SOURCE if keeps else DEFAULT_QUANTIZATION
        kv_quantization = kv_quantization or ("int4" if keeps else None)
    weights, kv = resolve(quantization, kv_quantization)
    if weights.matrices is None:
        weights, kv = resolve(quantization, kv_quantization, storage_table(checkpoint))
    return weights, kv
