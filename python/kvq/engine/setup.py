"""Brings a model from any stage to a core that is ready to step: planned first, then loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq.config import ChatConfig
from kvq.engine.core import EngineCore
from kvq.errors import ConfigError, LibraryError
from kvq.memory import MemoryPlan
from kvq.memory_budget import available_memory, fit_cache
from kvq.quantization.scheme import resolve
from kvq.runtime.cache_shape import CacheShape
from kvq.runtime.device import Device
from kvq.runtime.gpu_memory import GpuMemory
from kvq.runtime.library import Library
from kvq.runtime.loaded_model import LoadedModel, checked_limits
from kvq.runtime.metadata import Metadata
from kvq.sizes import format_bytes, parse_size
from kvq.tokenizer import Tokenizer

logger = logging.getLogger("kvq")

#: Rows of a step where nothing is said and requests share steps on a CPU: whoever decodes waits for a chunk.
SHARED_CHUNK = 512
#: Part of the available memory that ``server`` takes when nothing is said.
DEFAULT_UTILIZATION = 0.85


@dataclass(frozen=True)
class EngineOptions:
    """How to build and run a model; the parameters of :class:`kvq.engine.Engine`."""

    quantization: str | None = None
    kv_quantization: str | None = None
    context_window_size: int | None = None
    prefill_chunk_size: int | None = None
    max_num_sequence: int | None = None
    memory: str | int | None = None
    gpu_memory_utilization: float | None = None
    mode: str = "local"
    prefix_cache: bool = True
    device: str = "cpu"
    model_lib: str | Path | None = None
    opt: str | None = None
    activations: str | None = None


@dataclass(frozen=True)
class EngineParts:
    """A model that is ready, and what belongs to it."""

    core: EngineCore
    model: LoadedModel
    tokenizer: Tokenizer
    config: ChatConfig
    metadata: Metadata
    plan: MemoryPlan
    shape: CacheShape
    model_name: str


def set_up(
    model: str | Path, options: EngineOptions, report: Callable[[str], None] | None = None
) -> EngineParts:
    """Build what is missing, plan the memory, refuse what does not fit, then load.

    Raises
    ------
    KvqError
        If the model cannot be brought to run.
    """
    from kvq.build import prepare_model

    say = report or (lambda _: None)
    memory = GpuMemory() if options.device == "cuda" else None
    used = memory.used if memory else 0
    available = memory.free if memory else _available(options.device)
    budget = _budget(options, available)
    built = prepare_model(
        model,
        options.quantization,
        options.kv_quantization,
        context_window_size=options.context_window_size,
        prefill_chunk_size=options.prefill_chunk_size,
        max_batch_size=options.max_num_sequence,
        device=Device.kind_of(options.device),
        opt=options.opt,
        activations=options.activations,
        model_lib=options.model_lib,
        report=say,
    )
    config = ChatConfig.load(built.config_dir)
    tokenizer = Tokenizer.from_dir(built.config_dir)
    library = Library.load(built.library, options.device)
    library.device.synchronize()  # so that the driver has made its context, which counts
    meta = library.metadata
    _check_scheme(options, meta, built.library)
    context, most_sequences, chunk = checked_limits(
        meta,
        context_window_size=options.context_window_size,
        prefill_chunk_size=options.prefill_chunk_size,
    )
    if options.prefill_chunk_size is None and options.mode != "interactive" and options.device == "cpu":
        chunk = min(chunk, SHARED_CHUNK)
    shape, plan = fit_cache(
        meta.model,
        meta.layout,
        weights_bytes=library.params_bytes,
        context_window_size=context,
        prefill_chunk_size=chunk,
        max_batch_size=most_sequences,
        mode=options.mode,
        max_num_sequence=options.max_num_sequence,
        budget=budget,
        fill=options.memory is not None,
        scratch_slots=meta.scratch_slots,
        step_bytes=None if options.device == "cpu" else meta.step_bytes,
        device_bytes=memory.overhead(used) if memory else 0,
        largest_tensor=library.device.largest_tensor,
    )
    chunk = min(chunk, context * shape.num_open)
    logger.info("memory plan: %s", describe_plan(plan, shape))
    if available is not None:
        plan.check(available)
    say("loading weights")
    loaded = LoadedModel(library, library.load_params(built.weights_dir), shape, chunk)
    core = EngineCore(
        loaded,
        tokenizer.stream,
        context_window_size=context,
        prefill_chunk_size=chunk,
        vocab_size=config.active_vocab_size,
        prefix_cache=options.prefix_cache,
    )
    return EngineParts(core, loaded, tokenizer, config, meta, plan, shape, str(model))


def describe_plan(plan: MemoryPlan, shape: CacheShape) -> str:
    """The plan in one line."""
    driver = f", the driver {format_bytes(plan.device_bytes)}" if plan.device_bytes else ""
    return (
        f"weights {format_bytes(plan.weights_bytes)}, KV pool {format_bytes(plan.kv_sealed_bytes)} for "
        f"{plan.max_tokens} tokens at {plan.bits_per_value:.2f} bits per value, {shape.num_open} open pages "
        f"{format_bytes(plan.kv_open_bytes)}, workspace {format_bytes(plan.kv_workspace_bytes)}, activations "
        f"up to {format_bytes(plan.activation_bytes)}{driver}: {format_bytes(plan.total_bytes)} in all"
    )


def _budget(options: EngineOptions, available: int | None) -> int | None:
    """Bytes that the engine may take; None where the mode decides by numbers of tokens."""
    if options.memory is not None and options.gpu_memory_utilization is not None:
        raise ConfigError("--memory and --gpu-memory-utilization exclude each other: use one of them")
    if options.memory is not None:
        return parse_size(str(options.memory))
    part = options.gpu_memory_utilization
    if part is None:
        if options.mode != "server":
            return None
        part = DEFAULT_UTILIZATION
    if not 0 < part <= 1:
        raise ConfigError(f"--gpu-memory-utilization {part} makes no sense: it must be above 0, at most 1")
    if available is None:
        raise ConfigError("the available memory is unknown here: use --memory, such as --memory 48GB")
    return int(available * part)


def _available(device: str) -> int | None:
    """Bytes that can still be had on the device; None where unknown."""
    if device == "cpu":
        return available_memory()
    found = Device.open(device).handle.available_global_memory
    return None if found is None else int(found)


def _check_scheme(options: EngineOptions, meta: Metadata, library: Path) -> None:
    """A library that was found or given must have what is asked for."""
    if options.activations not in (None, "auto", meta.activations):
        raise LibraryError(
            f"{library}: was compiled for activations in {meta.activations}, not {options.activations}: "
            "leave --model-lib out to have it compiled"
        )
    if options.quantization is None and options.kv_quantization is None:
        return
    weights, kv = resolve(options.quantization or meta.quantization, options.kv_quantization)
    asked: tuple[Any, Any] = (weights.name, str(kv))
    has = (meta.quantization, meta.kv_quantization)
    if asked != has:
        raise LibraryError(
            f"{library}: was compiled for weights in {has[0]} and a KV cache in {has[1]}, not {asked[0]} "
            f"and {asked[1]}: leave --model-lib out to have it compiled"
        )
