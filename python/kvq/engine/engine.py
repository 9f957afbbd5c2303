"""``Engine``: a model, from any stage, behind OpenAI-shaped calls."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvq.config import ChatConfig
from kvq.engine.completions import Chat, Completions
from kvq.engine.core import EngineCore, Stats
from kvq.errors import LibraryError
from kvq.memory import MemoryPlan, available_memory, format_bytes, plan_cache
from kvq.quantization.scheme import resolve
from kvq.runtime.cache_shape import CacheShape
from kvq.runtime.library import Library
from kvq.runtime.loaded_model import LoadedModel, checked_limits
from kvq.tokenizer import Tokenizer

logger = logging.getLogger("kvq")


class Engine:
    """A model ready to answer, one request at a time.

    Parameters
    ----------
    model : str or Path
        A compiled pair, a converted directory, a checkpoint (converted and compiled into a cache
        directory first), or ``smollm2``.
    quantization, kv_quantization : str, optional
        Schemes of weights and cache; what the model has by default, ``q4f16kv`` for a checkpoint.
    context_window_size, prefill_chunk_size : int, optional
        Most tokens of a sequence, and of a prefill step.
    device : str
        ``cpu``.
    model_lib : str or Path, optional
        A compiled library to use.
    opt : str, optional
        Optimization level of a library that has to be compiled: ``O1`` has exact activations.
    report : callable, optional
        Told in words what is being done.

    Attributes
    ----------
    chat.completions, completions
        ``create(...)`` as in OpenAI's client.
    plan : MemoryPlan
        What was planned before it was allocated.

    Raises
    ------
    KvqError
        If the model cannot be brought to run.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        quantization: str | None = None,
        kv_quantization: str | None = None,
        context_window_size: int | None = None,
        prefill_chunk_size: int | None = None,
        device: str = "cpu",
        model_lib: str | Path | None = None,
        opt: str | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        from kvq.build import prepare_model

        say = report or (lambda _: None)
        built = prepare_model(
            model,
            quantization,
            kv_quantization,
            context_window_size=context_window_size,
            prefill_chunk_size=prefill_chunk_size,
            device=device,
            opt=opt,
            model_lib=model_lib,
            report=say,
        )
        self.model_name = str(model)
        self.config = ChatConfig.load(built.config_dir)
        self.tokenizer = Tokenizer.from_dir(built.config_dir)
        library = Library.load(built.library, device)
        self.metadata = meta = library.metadata
        self._check_scheme(quantization, kv_quantization, built.library)
        context, _, chunk = checked_limits(
            meta, context_window_size=context_window_size, prefill_chunk_size=prefill_chunk_size
        )
        shape = CacheShape.for_limits(meta.layout, context_window_size=context, prefill_chunk_size=chunk)
        chunk = min(chunk, context)
        self.plan: MemoryPlan = plan_cache(
            meta.model,
            meta.layout,
            shape,
            weights_bytes=library.params_bytes,
            max_rows=chunk,
            scratch_slots=meta.scratch_slots,
        )
        logger.info("memory plan: %s", describe_plan(self.plan))
        if (available := available_memory()) is not None:
            self.plan.check(available)
        say("loading weights")
        self.model = LoadedModel(library, library.load_params(built.weights_dir), shape, chunk)
        self._core = EngineCore(
            self.model,
            context_window_size=context,
            prefill_chunk_size=chunk,
            vocab_size=self.config.active_vocab_size,
        )
        self.completions = Completions(self._core, self.tokenizer, self.config, self.model_name)
        self.chat = Chat(self.completions)

    def _check_scheme(self, quantization: str | None, kv_quantization: str | None, library: Path) -> None:
        """A library that was found or given must have the schemes that are asked for."""
        if quantization is None and kv_quantization is None:
            return
        weights, kv = resolve(quantization or self.metadata.quantization, kv_quantization)
        asked = (weights.name, str(kv))
        has = (self.metadata.quantization, self.metadata.kv_quantization)
        if asked != has:
            raise LibraryError(
                f"{library}: was compiled for weights in {has[0]} and a KV cache in {has[1]}, not {asked[0]} "
                f"and {asked[1]}: leave --model-lib out to have it compiled"
            )

    @property
    def context_window_size(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._core.context_window_size

    @property
    def stats(self) -> Stats:
        """What the last request cost."""
        return self._core.stats

    def reset(self) -> None:
        """Forget what the cache holds."""
        self._core.reset()

    def allocated_bytes(self) -> dict[str, int]:
        """Bytes of the weights and of each of the cache's tensors, counted from the tensors."""
        sizes: dict[str, Any] = {"weights": self.model.params.nbytes, **self.model.nbytes}
        return sizes


def describe_plan(plan: MemoryPlan) -> str:
    """The plan in one line."""
    return (
        f"weights {format_bytes(plan.weights_bytes)}, KV pool {format_bytes(plan.kv_sealed_bytes)} for "
        f"{plan.max_tokens} tokens at {plan.bits_per_value:.2f} bits per value, open pages "
        f"{format_bytes(plan.kv_open_bytes)}, workspace {format_bytes(plan.kv_workspace_bytes)}, activations "
        f"up to {format_bytes(plan.activation_bytes)}: {format_bytes(plan.total_bytes)} in all"
    )
