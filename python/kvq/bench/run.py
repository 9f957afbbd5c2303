"""``kvq bench decode`` and ``kvq bench prefill``: tokens per second, whole steps as they are served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvq.bench.shape import shape_directory
from kvq.bench.timing import take_turns, timed
from kvq.build import DEFAULT_QUANTIZATION
from kvq.compare import Comparison
from kvq.errors import check_positive
from kvq.runtime.kv_cache import SequenceId
from kvq.runtime.loaded_model import LoadedModel

_BASE = "base"

#: Called with what is being done.
Report = Callable[[str], None]


def _random_ids(model: LoadedModel, count: int) -> np.ndarray:
    """Token ids for a speed test, int32 ``[count]``; their values do not matter to the kernels."""
    return np.random.RandomState(0).randint(0, model.metadata.model.vocab_size, count).astype(np.int32)


def fill(model: LoadedModel, sequence: str, until: int, chunk: int) -> None:
    """Prefill random tokens until a sequence is ``until`` tokens long."""
    ids = _random_ids(model, until)
    while (length := model.cache.length(sequence)) < until:
        count = min(chunk, until - length)
        model.step([(sequence, count)], ids[length : length + count])


class Decoding:
    """Greedy decoding of a few forks of one long sequence, undone after each round."""

    def __init__(self, model: LoadedModel, batch: int, steps: int) -> None:
        self._model, self._steps = model, steps
        self._requests: list[tuple[SequenceId, int]] = [(f"fork {i}", 1) for i in range(batch)]

    def round(self) -> float:
        """Seconds of ``steps`` steps: planning, the model, and greedy sampling."""
        model, requests = self._model, self._requests
        for name, _ in requests:
            again = model.cache.fork_sequence(_BASE, name)
            assert again == 0, "a fork at the end of a sequence recomputes nothing"
        ids: Any = [1] * len(requests)

        def steps() -> None:
            nonlocal ids
            for _ in range(self._steps):
                ids = model.likeliest(requests, ids)

        try:
            return timed(steps)
        finally:
            for name, _ in requests:
                model.cache.remove_sequence(name)


def bench_decode(
    model: str,
    schemes: Sequence[str],
    contexts: Sequence[int],
    *,
    quantization: str | None = None,
    opt: str = "O2",
    batch: int = 1,
    steps: int = 32,
    rounds: int = 5,
    device: str = "cpu",
    random_weights: bool = False,
    report: Report | None = None,
) -> list[dict[str, Any]]:
    """Measure decoding at several context lengths.

    Parameters
    ----------
    contexts : sequence of int
        Tokens in the cache before the first step that is timed.
    batch : int
        Sequences that decode together; tokens per second count all of them.
    steps, rounds : int
        Steps of a round; rounds, of which each scheme takes one in turn.
    device : str
        ``cpu`` or ``cuda``.
    random_weights : bool
        Whether ``model`` is the name of a shape (:mod:`kvq.presets`), with weights made up on the device.

    Returns
    -------
    list of dict
        A dict a context and scheme: the fields of :class:`kvq.bench.timing.Rate`, ``context``, ``batch``,
        ``threads``, ``quantization`` and ``opt``.

    Raises
    ------
    KvqError
        If an argument or the model is unsuitable.
    """
    check_positive(context=min(contexts), batch=batch, steps=steps, rounds=rounds)
    say = report or (lambda _: None)
    comparison = _comparison(
        model, quantization, schemes, opt, max(contexts) + steps, device, random_weights, say
    )
    chunk = min(comparison.prefill_chunk_size, max(contexts))
    models = comparison.load(max(contexts) + steps, chunk, sequences=batch + 1, extra_tokens=steps)
    for loaded in models:
        loaded.cache.add_sequence(_BASE)
    rows: list[dict[str, Any]] = []
    for context in sorted(set(contexts)):
        for name, loaded in zip(schemes, models, strict=True):
            say(f"filling {context} tokens, {name}")
            fill(loaded, _BASE, context, chunk)
        say(f"decoding at {context}")
        work = [Decoding(loaded, batch, steps).round for loaded in models]
        common = {"context": context, "batch": batch, **_conditions(comparison, models[0], opt)}
        rows += [rate.to_dict() | common for rate in take_turns(schemes, work, batch * steps, rounds)]
    return rows


def bench_prefill(
    model: str,
    schemes: Sequence[str],
    lengths: Sequence[int],
    *,
    quantization: str | None = None,
    opt: str = "O2",
    chunk: int | None = None,
    rounds: int = 3,
    device: str = "cpu",
    random_weights: bool = False,
    report: Report | None = None,
) -> list[dict[str, Any]]:
    """Measure prefill of prompts of several lengths, into an empty cache, with the logits of the last row.

    Parameters
    ----------
    lengths : sequence of int
        Tokens of the prompts.
    chunk : int, optional
        Tokens of a step; the library's by default.
    device, random_weights
        As of :func:`bench_decode`.

    Returns
    -------
    list of dict
        As of :func:`bench_decode`, with ``tokens`` and ``chunk`` instead of ``context`` and ``batch``.

    Raises
    ------
    KvqError
        If an argument or the model is unsuitable.
    """
    check_positive(tokens=min(lengths), rounds=rounds)
    say = report or (lambda _: None)
    comparison = _comparison(model, quantization, schemes, opt, max(lengths), device, random_weights, say)
    chunk = chunk or min(comparison.prefill_chunk_size, max(lengths))
    models = comparison.load(max(lengths), chunk)
    rows: list[dict[str, Any]] = []
    for length in sorted(set(lengths)):
        say(f"prefilling {length} tokens")
        work = [partial(_prefill_round, loaded, length, chunk) for loaded in models]
        common = {"tokens": length, "chunk": min(chunk, length), **_conditions(comparison, models[0], opt)}
        rows += [rate.to_dict() | common for rate in take_turns(schemes, work, length, rounds)]
    return rows


def _comparison(
    model: str,
    quantization: str | None,
    schemes: Sequence[str],
    opt: str,
    context: int,
    device: str,
    random_weights: bool,
    report: Report,
) -> Comparison:
    """The models to measure, for sequences of ``context`` tokens."""
    if random_weights:
        model = str(shape_directory(model, quantization or DEFAULT_QUANTIZATION, context))
    return Comparison(model, quantization, schemes, opt, report, device=device, random_weights=random_weights)


def _prefill_round(model: LoadedModel, length: int, chunk: int) -> float:
    """Seconds of a prompt of ``length`` tokens in a sequence of its own."""
    model.cache.add_sequence(_BASE)
    try:
        return timed(lambda: fill(model, _BASE, length, chunk))
    finally:
        model.cache.remove_sequence(_BASE)


def _conditions(comparison: Comparison, loaded: LoadedModel, opt: str) -> dict[str, Any]:
    return {
        "device": loaded.metadata.device,
        "threads": comparison.threads,
        "quantization": loaded.metadata.quantization,
        "opt": opt,
    }
