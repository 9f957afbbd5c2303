"""What the engines have in common: how they are built, and what they tell about themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kvq.engine.request import EngineStats, Request, RequestStats
from kvq.engine.setup import EngineOptions, EngineParts, set_up

_Host = TypeVar("_Host", bound="EngineHost")


class EngineHost:
    """A model ready to answer.

    Parameters
    ----------
    model : str or Path
        A compiled pair, a converted directory, a checkpoint (converted and compiled into a cache
        directory first), or ``smollm2``.
    quantization, kv_quantization : str, optional
        Schemes of weights and cache; what the model has by default, ``q4f16kv`` for a checkpoint.
    context_window_size, prefill_chunk_size : int, optional
        Most tokens of a sequence, and rows of a step (512 on a CPU, where several requests may share it).
    max_num_sequence : int, optional
        Requests that run at once; further ones wait.
    memory : str or int, optional
        Bytes for everything, such as ``"48GB"``; what weights and workspace leave is KV cache.
    gpu_memory_utilization : float, optional
        The same as a part of the memory that is available on the device.
    mode : str
        ``local``: four requests at once; ``interactive``: one; ``server``: as many as there is memory for.
        A budget decides the number too, ``interactive`` apart.
    prefix_cache : bool
        Whether pages of earlier prompts and answers serve later ones.
    device : str
        ``cpu``, ``cuda``, or ``vulkan``, of several ``vulkan:1``.
    model_lib : str or Path, optional
        A compiled library to use.
    opt : str, optional
        Optimization level of a library that has to be compiled: ``O1`` has exact activations.
    activations : str, optional
        What CUDA's tensor cores take: ``float16`` or ``bfloat16``; by default the model's family decides.
    report : callable, optional
        Told in words what is being done.

    Attributes
    ----------
    config, tokenizer, metadata, model, model_name
        What was loaded.
    plan : MemoryPlan
        What was planned before it was allocated.

    Raises
    ------
    KvqError
        If the model cannot be brought to run.
    """

    def __init__(
        self, model: str | Path, *, report: Callable[[str], None] | None = None, **options: Any
    ) -> None:
        self._start(set_up(model, EngineOptions(**options), report))

    @classmethod
    def of(cls: type[_Host], parts: EngineParts) -> _Host:
        """An engine over what is loaded already."""
        engine = cls.__new__(cls)
        engine._start(parts)
        return engine

    def _start(self, parts: EngineParts) -> None:
        self._core = parts.core
        self.model, self.tokenizer, self.config = parts.model, parts.tokenizer, parts.config
        self.metadata, self.plan, self.model_name = parts.metadata, parts.plan, parts.model_name

    @property
    def context_window_size(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._core.context_window_size

    @property
    def last_request(self) -> RequestStats:
        """What the request that ended last cost."""
        return self._core.last_request

    def stats(self) -> EngineStats:
        """The engine at this moment, and its totals."""
        return self._core.stats()

    def check(self, request: Request) -> None:
        """Refuse a request that can never run; raises ConfigError."""
        self._core.check(request)

    def allocated_bytes(self) -> dict[str, int]:
        """Bytes of the weights and of each of the cache's tensors, counted from the tensors."""
        return {"weights": self.model.params.nbytes, **self.model.nbytes}
