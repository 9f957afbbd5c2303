"""``kvq bench decode`` and ``kvq bench prefill``: tokens per second, whole steps as they are served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvq.bench.contexts import Decoding, fill, fill_all
from kvq.bench.shape import shape_directory, shape_libraries
from kvq.bench.step_peers import StepPeer, make_peer
from kvq.bench.timing import take_turns, timed
from kvq.build import DEFAULT_ACTIVATIONS, DEFAULT_QUANTIZATION
from kvq.compare import Comparison
from kvq.errors import check_positive
from kvq.runtime.loaded_model import LoadedModel

#: Called with what is being done.
Report = Callable[[str], None]


@dataclass(frozen=True)
class BenchSetup:
    """What is measured.

    Attributes
    ----------
    model : str
        As the command line takes it or, with ``random_weights``, the name of a shape (:mod:`kvq.presets`)
        whose weights are made up on the device.
    schemes : sequence of str
        Cache schemes.
    quantization, opt, activations, device : str
        As the command line takes them.
    libraries : Path, optional
        Directory of compiled libraries of the shape (:func:`kvq.bench.shape.shape_libraries`).
    peers : sequence of str
        Names of :mod:`kvq.bench.step_peers`, measured on the same shape, each on its own.
    """

    model: str
    schemes: Sequence[str]
    quantization: str | None = None
    opt: str = "O2"
    activations: str = DEFAULT_ACTIVATIONS
    device: str = "cpu"
    random_weights: bool = False
    libraries: Path | None = None
    peers: Sequence[str] = ()

    def comparison(self, context: int, report: Report) -> Comparison:
        """The models, for sequences of ``context`` tokens.

        Raises
        ------
        KvqError
            If a model is unsuitable.
        """
        model, libraries = self.model, None
        if self.random_weights:
            quantization = self.quantization or DEFAULT_QUANTIZATION
            model = str(shape_directory(self.model, quantization, context))
            if self.libraries is not None:
                libraries = shape_libraries(
                    self.libraries, self.model, quantization, self.schemes, self.activations
                )
        return Comparison(
            model,
            self.quantization,
            self.schemes,
            self.opt,
            report,
            activations=self.activations,
            device=self.device,
            random_weights=self.random_weights,
            libraries=libraries,
        )


def bench_decode(
    setup: BenchSetup,
    contexts: Sequence[int],
    batches: Sequence[int] = (1,),
    *,
    steps: int = 32,
    rounds: int = 5,
    report: Report | None = None,
) -> list[dict[str, Any]]:
    """Measure decoding at several context lengths and numbers of sequences.

    Parameters
    ----------
    contexts : sequence of int
        Tokens in the cache, of each sequence, before the first step that is timed.
    batches : sequence of int
        Sequences that decode together; tokens per second count all of them.
    steps, rounds : int
        Steps of a round; rounds, of which each scheme takes one in turn.

    Returns
    -------
    list of dict
        A dict a batch, context, and scheme or peer: the fields of :class:`kvq.bench.timing.Rate`,
        ``context``, ``batch``, ``device``, ``threads``, ``quantization``, ``opt`` and ``activations``.

    Raises
    ------
    KvqError
        If an argument or the model is unsuitable.
    """
    check_positive(context=min(contexts), batch=min(batches), steps=steps, rounds=rounds)
    say = report or (lambda _: None)
    comparison = setup.comparison(max(contexts) + steps, say)
    rows: list[dict[str, Any]] = []
    for batch in sorted(set(batches)):
        for context in sorted(set(contexts)):
            chunk = min(comparison.prefill_chunk_size, context)
            models = comparison.load(
                context + steps,
                chunk,
                sequences=2 * batch,
                extra_tokens=steps,
                whole_sequences=batch,
            )
            names = [f"sequence {i}" for i in range(batch)]
            for scheme, loaded in zip(setup.schemes, models, strict=True):
                say(f"filling {batch} x {context} tokens, {scheme}")
                for name in names:
                    loaded.cache.add_sequence(name)
                fill_all(loaded, names, context, chunk)
            say(f"decoding at {batch} x {context}")
            work = [Decoding(loaded, names, steps).round for loaded in models]
            where = {"context": context, "batch": batch, **_conditions(comparison, models[0], setup.opt)}
            found = [
                rate.to_dict() | where for rate in take_turns(setup.schemes, work, batch * steps, rounds)
            ]
            model = models[0].metadata.model
            del models, work, loaded
            comparison.release()

            def peer_round(peer: StepPeer, batch: int = batch, context: int = context) -> Callable[[], float]:
                return peer.decoding(batch, context, steps)

            rows += found + _peers(setup, model, found[0], peer_round, batch * steps, rounds, say)
    return rows


def bench_prefill(
    setup: BenchSetup,
    lengths: Sequence[int],
    *,
    chunk: int | None = None,
    rounds: int = 3,
    report: Report | None = None,
) -> list[dict[str, Any]]:
    """Measure prefill of prompts of several lengths, into an empty cache, with the last row's token.

    Parameters
    ----------
    lengths : sequence of int
        Tokens of the prompts.
    chunk : int, optional
        Tokens of a step; the library's by default. Peers take a prompt in one piece.

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
    comparison = setup.comparison(max(lengths), say)
    chunk = chunk or min(comparison.prefill_chunk_size, max(lengths))
    rows: list[dict[str, Any]] = []
    for length in sorted(set(lengths)):
        models = comparison.load(max(lengths), chunk)
        say(f"prefilling {length} tokens")
        work = [partial(_prefill_round, loaded, length, chunk) for loaded in models]
        where = {
            "tokens": length,
            "chunk": min(chunk, length),
            **_conditions(comparison, models[0], setup.opt),
        }
        found = [rate.to_dict() | where for rate in take_turns(setup.schemes, work, length, rounds)]
        model = models[0].metadata.model
        del models, work
        comparison.release()

        def peer_round(peer: StepPeer, length: int = length) -> Callable[[], float]:
            return peer.prefilling(length)

        rows += found + _peers(setup, model, found[0], peer_round, length, rounds, say)
    return rows


def _peers(
    setup: BenchSetup,
    model: Any,
    first: dict[str, Any],
    peer_round: Callable[[StepPeer], Callable[[], float]],
    tokens: int,
    rounds: int,
    report: Report,
) -> list[dict[str, Any]]:
    """Rows of the peers; ratios are to the median of ``first``, the first scheme's row."""
    rows = []
    for name in setup.peers:
        report(f"measuring {name}")
        peer = make_peer(name, model)
        try:
            (rate,) = take_turns([peer.label], [peer_round(peer)], tokens, rounds)
        finally:
            peer.release()
        ratio = rate.tokens_per_second / first["tokens_per_second"]
        same = {key: value for key, value in first.items() if key not in rate.to_dict()}
        rows.append(
            rate.to_dict()
            | {"ratio": ratio}
            | same
            | {"quantization": "float16", "opt": "", "activations": "float16"}
        )
    return rows


def _prefill_round(model: LoadedModel, length: int, chunk: int) -> float:
    """Seconds of a prompt of ``length`` tokens in a sequence of its own."""
    model.cache.add_sequence("prompt")
    try:
        return timed(lambda: fill(model, "prompt", length, chunk))
    finally:
        model.cache.remove_sequence("prompt")


def _conditions(comparison: Comparison, loaded: LoadedModel, opt: str) -> dict[str, Any]:
    return {
        "device": loaded.metadata.device,
        "threads": comparison.threads,
        "quantization": loaded.metadata.quantization,
        "opt": opt,
        "activations": loaded.metadata.activations,
    }
