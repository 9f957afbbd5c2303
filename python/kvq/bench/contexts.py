"""Sequences of a given length for a measurement, each with pages of its own, and decoding on top of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvq.bench.timing import timed
from kvq.runtime.kv_cache import SequenceId
from kvq.runtime.loaded_model import LoadedModel

#: Tokens of one sequence that are computed; what is beyond, and all other sequences, are copies of its pages.
COMPUTED = 8192


def fill(model: LoadedModel, sequence: SequenceId, until: int, chunk: int) -> None:
    """Prefill random tokens until a sequence is ``until`` tokens long."""
    vocab = model.metadata.model.vocab_size
    ids = np.random.RandomState(0).randint(0, vocab, until).astype(np.int32)
    while (length := model.cache.length(sequence)) < until:
        count = min(chunk, until - length)
        model.likeliest([(sequence, count)], ids[length : length + count])


def fill_all(model: LoadedModel, sequences: Sequence[SequenceId], context: int, chunk: int) -> None:
    """Bring empty sequences to ``context`` tokens, in the time of :data:`COMPUTED` tokens at most."""
    first = sequences[0]
    fill(model, first, min(context, COMPUTED), chunk)
    computed = list(model.cache.sequence(first).pages)
    for name in sequences:
        while (length := model.cache.length(name)) < context:
            model.cache.begin_step([(name, min(chunk, context - length))])
            model.cache.commit_step()
        if computed:
            pages = model.cache.sequence(name).pages
            for at in range(len(computed) if name == first else 0, len(pages)):
                model.tensors.copy_sealed(computed[at % len(computed)], pages[at])


class Decoding:
    """Greedy decoding of forks of sequences, undone after each round."""

    def __init__(self, model: LoadedModel, sequences: Sequence[SequenceId], steps: int) -> None:
        self._model, self._steps = model, steps
        self._forks: list[tuple[SequenceId, SequenceId]] = [(name, f"fork of {name}") for name in sequences]

    def round(self) -> float:
        """Seconds of ``steps`` steps: planning, the model, and greedy sampling."""
        model = self._model
        for name, fork in self._forks:
            again = model.cache.fork_sequence(name, fork)
            assert again == 0, "a fork at the end of a sequence recomputes nothing"
        requests = [(fork, 1) for _, fork in self._forks]
        ids: Any = [1] * len(requests)

        def steps() -> None:
            nonlocal ids
            for _ in range(self._steps):
                ids = np.maximum(model.likeliest(requests, ids), 0)

        try:
            return timed(steps)
        finally:
            for fork, _ in requests:
                model.cache.remove_sequence(fork)
