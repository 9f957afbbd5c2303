"""The memory plan: what a model will allocate, term by term, before anything is.

Cache terms are computed by the same sum that the runtime allocates by (:mod:`kvq.runtime.cache_shape`),
so they agree to the byte. Activations are what a library says that its steps take or, before there is one and
on a CPU, where only what is touched counts, an upper estimate of what a step holds at once.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from kvq.config import ModelConfig
from kvq.errors import OutOfMemoryError
from kvq.layout import KVLayout
from kvq.quantization.scheme import KVQuantization, WeightScheme
from kvq.quantization.weights import stored_parameters
from kvq.runtime.cache_shape import (
    SCRATCH_SLOTS,
    CacheShape,
    logit_bytes,
    logit_room,
    scratch_bytes,
)
from kvq.runtime.gpu_memory import HEADROOM
from kvq.sizes import format_bytes

#: Rows of a weight matrix that the kernels keep together.
ROW_BLOCK = 16

#: Bytes of a context of CUDA; an H200's driver took so many.
TYPICAL_CONTEXT = 526 << 20

_ITEMSIZE = {"float32": 4, "float16": 2, "uint32": 4}

#: The flag that lowers each term.
_REMEDIES = {
    "weights_bytes": "--quantization q4f16_1 (or a smaller model)",
    "kv_sealed_bytes": "--kv-quantization int3, or a smaller --context-window-size or --max-batch-size",
    "kv_open_bytes": "--max-batch-size",
    "kv_workspace_bytes": "--prefill-chunk-size",
    "activation_bytes": "--prefill-chunk-size",
    "device_bytes": "a GPU that nobody else uses",
}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by term.

    Attributes
    ----------
    weights_bytes : int
        Weights, as they are loaded.
    kv_sealed_bytes, kv_open_bytes : int
        The pool of sealed pages, and the open pages.
    kv_workspace_bytes : int
        A step's row pages, the attention's scratch and the fault counters.
    activation_bytes : int
        The other tensors of a step.
    device_bytes : int
        What the driver of a GPU takes for itself: its context, code, graphs.
    bits_per_value : float
        Of a value in a sealed page, everything included.
    max_tokens : int
        Tokens that the pool of sealed pages holds.
    """

    weights_bytes: int
    kv_sealed_bytes: int
    kv_open_bytes: int
    kv_workspace_bytes: int
    activation_bytes: int
    device_bytes: int
    bits_per_value: float
    max_tokens: int

    @property
    def kv_bytes(self) -> int:
        """Everything the cache takes."""
        return self.kv_sealed_bytes + self.kv_open_bytes + self.kv_workspace_bytes

    @property
    def total_bytes(self) -> int:
        """The sum of all terms."""
        return self.weights_bytes + self.kv_bytes + self.activation_bytes + self.device_bytes

    def to_dict(self) -> dict[str, int | float]:
        """All fields and the total, JSON-ready."""
        fields = asdict(self)
        tail = {name: fields.pop(name) for name in ("bits_per_value", "max_tokens")}
        return {**fields, "total_bytes": self.total_bytes, **tail}

    def check(self, budget: int) -> None:
        """Refuse a plan beyond ``budget`` bytes.

        Raises
        ------
        OutOfMemoryError
            Names the largest term and the flag that lowers it.
        """
        if self.total_bytes <= budget:
            return
        name = max(_REMEDIES, key=lambda term: getattr(self, term))
        raise OutOfMemoryError(
            f"{format_bytes(self.total_bytes)} are needed and {format_bytes(budget)} are there; the largest "
            f"term is {name} with {format_bytes(getattr(self, name))}: lower it with {_REMEDIES[name]}"
        )


def kv_layout(model: ModelConfig, weights: WeightScheme, kv: KVQuantization, page_size: int = 64) -> KVLayout:
    """Layout of a model's cache under a weight and a cache scheme."""
    return KVLayout(
        model.num_hidden_layers,
        model.num_key_value_heads,
        model.head_dim,
        kv.k_bits,
        kv.v_bits,
        page_size,
        kv.row_dtype(weights),
    )


def weights_bytes(model: ModelConfig, weights: WeightScheme) -> int:
    """Bytes of the weights as loaded: rows of matrices in whole blocks, norms and biases in float32."""
    total = 0
    for tensor in stored_parameters(model, weights):
        if len(tensor.shape) == 1:
            total += tensor.shape[0] * 4
        else:
            rows = -(-tensor.shape[0] // ROW_BLOCK) * ROW_BLOCK
            total += rows * math.prod(tensor.shape[1:]) * _ITEMSIZE[tensor.dtype]
    return total


def device_costs(model: ModelConfig, rows: int, device: str) -> dict[str, Any]:
    """What :func:`plan_cache` is to count of a device before there is a library, or the device itself.

    Parameters
    ----------
    rows : int
        Most rows of a step.
    device : str
        As ``--device`` names it. On a CPU only what a step touches counts.
    """
    if device == "cpu":
        return {}
    driver = TYPICAL_CONTEXT + HEADROOM if device == "cuda" else 0
    return {"step_bytes": _row_bytes(model, rows), "device_bytes": driver}


def plan_cache(
    model: ModelConfig,
    layout: KVLayout,
    shape: CacheShape,
    *,
    weights_bytes: int,
    max_rows: int,
    scratch_slots: int = SCRATCH_SLOTS,
    step_bytes: int | None = None,
    device_bytes: int = 0,
) -> MemoryPlan:
    """The plan of a cache whose pages are already counted.

    Parameters
    ----------
    max_rows : int
        Most rows of a step.
    scratch_slots : int
        Of the library's metadata.
    step_bytes : int, optional
        Of the library's metadata, where its steps take all of that, whatever their rows.
    device_bytes : int
        As the plan has it.
    """
    faults = max_rows * 2 * 4
    return MemoryPlan(
        weights_bytes=weights_bytes,
        kv_sealed_bytes=shape.sealed_bytes(layout),
        kv_open_bytes=shape.open_bytes(layout),
        kv_workspace_bytes=shape.workspace_bytes(layout)
        + scratch_bytes(layout, model.num_attention_heads, scratch_slots)
        + faults,
        activation_bytes=_activation_bytes(model, max_rows, shape.num_open)
        if step_bytes is None
        # logits have memory of their own for every room up to the largest
        else step_bytes + logit_bytes(model, 2 * logit_room(shape.num_open) - 1),
        device_bytes=device_bytes,
        bits_per_value=layout.bits_per_value,
        max_tokens=shape.num_pages * layout.page_size,
    )


def plan_memory(
    model_config: ModelConfig,
    weight_scheme: WeightScheme,
    kv: KVQuantization,
    context_window_size: int,
    max_batch_size: int = 1,
    prefill_chunk_size: int = 2048,
    page_size: int = 64,
    device: str = "cpu",
) -> MemoryPlan:
    """Plan the memory of a model that is not compiled yet.

    Parameters
    ----------
    model_config, weight_scheme, kv
        The model and its schemes.
    context_window_size, max_batch_size : int
        Tokens of a sequence, and sequences at once; the pool holds all of them in full, or as much of them as
        later rows see where every layer slides.
    prefill_chunk_size : int
        Most rows of a step.
    device : str
        As of :func:`device_costs`.

    Raises
    ------
    ConfigError
        If a number makes no sense, or the schemes cannot store the model.
    """
    layout = kv_layout(model_config, weight_scheme, kv, page_size)
    shape = CacheShape.for_limits(
        layout,
        context_window_size=context_window_size,
        max_batch_size=max_batch_size,
        prefill_chunk_size=prefill_chunk_size,
        window=model_config.cache_window,
    )
    rows = max(min(prefill_chunk_size, context_window_size * max_batch_size), max_batch_size)
    return plan_cache(
        model_config,
        layout,
        shape,
        weights_bytes=weights_bytes(model_config, weight_scheme),
        max_rows=rows,
        **device_costs(model_config, rows, device),
    )


def _activation_bytes(model: ModelConfig, rows: int, logit_rows: int) -> int:
    """float32 tensors of the widest place of a layer, for all rows of a step, and the logits."""
    return _row_bytes(model, rows) + 4 * logit_rows * model.vocab_size


def _row_bytes(model: ModelConfig, rows: int) -> int:
    """The same without the logits."""
    qkv = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    copies = 1 if model.qk_norm is None else 3  # projected, in parts, put together again
    attention = copies * qkv + model.num_attention_heads * model.head_dim
    expert = model.moe_intermediate_size or 0
    experts = (model.num_experts_per_tok or 0) * (expert + max(2 * expert, model.hidden_size))
    widest = 2 * model.hidden_size + max(attention, 3 * model.intermediate_size, experts)
    return 4 * rows * widest
