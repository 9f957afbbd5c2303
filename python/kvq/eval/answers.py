"""Answers of a loaded model to many prompts at once, as serving computes them: forks of a shared beginning.

Sealed pages of the beginning are shared by all; each prompt runs its own tokens alone. A row's result depends
on neither batch nor chunk, so many prompts in one step get what each would have got by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvq.runtime.kv_cache import SequenceId
from kvq.runtime.loaded_model import LoadedModel

_SHARED = "shared"

#: Whether the tokens of an answer so far end it.
Stop = Callable[[Sequence[int]], bool]


@dataclass
class KeysRead:
    """Keys that the scored or generated tokens attended to: in sealed quantized pages, and in all."""

    quantized_keys: int = 0
    keys: int = 0

    def add(self, model: LoadedModel, position: int) -> None:
        """Count what a row at ``position`` attends to."""
        layout = model.layout
        self.keys += position + 1
        if layout.k_bits or layout.v_bits:
            self.quantized_keys += position // layout.page_size * layout.page_size


class Answers:
    """Prompts after a shared beginning.

    Parameters
    ----------
    model : LoadedModel
        Its cache must have room for the beginning and for the prompts that run at once.
    chunk : int
        Rows of a step, at most what the model was loaded for.
    vocab : int
        Tokens that can be answered; a model's vocabulary may be padded beyond them.

    Attributes
    ----------
    read : KeysRead
        What the answers so far attended to.
    """

    def __init__(self, model: LoadedModel, chunk: int, vocab: int) -> None:
        self._model, self._cache, self._chunk, self._vocab = model, model.cache, chunk, vocab
        self.read = KeysRead()

    def begin(self, ids: Sequence[int]) -> None:
        """Replace the shared beginning, which may be empty."""
        if _SHARED in self._cache:
            self._cache.remove_sequence(_SHARED)
        self._cache.add_sequence(_SHARED)
        self._prefill([(_SHARED, ids)])

    def follows(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[bool]:
        """Whether greedy decoding answers each prompt with exactly the tokens expected of it.

        Computed in one step, not token by token: as long as an answer is the expected one, the next token is
        drawn after the same tokens.
        """
        found: list[bool] = []
        for part in self._parts(len(prompts)):
            inputs = [[*prompts[i], *answers[i][:-1]] for i in part]
            wanted = [len(answers[i]) for i in part]
            forks = self._fork(part)
            best = self._prefill(list(zip(forks, inputs, strict=True)), wanted)
            found += [list(answers[i]) == tokens for i, tokens in zip(part, best, strict=True)]
            self._drop(forks)
        return found

    def greedy(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Stop = lambda _: False
    ) -> list[list[int]]:
        """The most likely tokens after each prompt, until ``stop`` or ``max_tokens``."""
        answers: list[list[int]] = []
        for part in self._parts(len(prompts)):
            forks = self._fork(part)
            first = self._prefill(
                [(fork, prompts[i]) for fork, i in zip(forks, part, strict=True)], [1] * len(part)
            )
            told = [list(tokens) for tokens in first]
            running = [at for at in range(len(part)) if not stop(told[at])]
            for _ in range(max_tokens - 1):
                if not running:
                    break
                requests = [(forks[at], 1) for at in running]
                for fork, _ in requests:
                    self.read.add(self._model, self._cache.length(fork))
                logits = self._model.step(requests, [told[at][-1] for at in running])
                for at, token in zip(running, self._best(logits), strict=True):
                    told[at].append(token)
                running = [at for at in running if not stop(told[at])]
            answers += told
            self._drop(forks)
        return answers

    def _parts(self, count: int) -> Iterator[range]:
        """Prompts that run at once; one open page is the shared beginning's."""
        at_once = self._model.shape.num_open - 1
        for start in range(0, count, at_once):
            yield range(start, min(start + at_once, count))

    def _fork(self, part: range) -> list[SequenceId]:
        forks: list[SequenceId] = [f"prompt {i}" for i in part]
        for fork in forks:
            again = self._cache.fork_sequence(_SHARED, fork)
            assert again == 0, "a fork at the end of a sequence recomputes nothing"
        return forks

    def _drop(self, forks: Sequence[SequenceId]) -> None:
        for fork in forks:
            self._cache.remove_sequence(fork)

    def _prefill(
        self, inputs: Sequence[tuple[SequenceId, Sequence[int]]], wanted: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Append tokens; the most likely token after each of the last ``wanted`` of every sequence."""
        counts = wanted if wanted is not None else [0] * len(inputs)
        best: list[list[int]] = [[] for _ in inputs]
        left = [(at, sequence, list(ids)) for at, (sequence, ids) in enumerate(inputs) if len(ids)]
        while left:
            step = self._take(left)
            rows: list[int] = []
            owners: list[int] = []
            start = 0
            for at, sequence, ids, remaining in step:
                scored = min(len(ids), max(0, counts[at] - remaining))
                rows += range(start + len(ids) - scored, start + len(ids))
                owners += [at] * scored
                for offset in range(len(ids) - scored, len(ids)):
                    self.read.add(self._model, self._cache.length(sequence) + offset)
                start += len(ids)
            flat: list[Any] = [token for _, _, ids, _ in step for token in ids]
            requests = [(sequence, len(ids)) for _, sequence, ids, _ in step]
            # A step has to ask for some row, though nobody may need it.
            logits = self._model.step(requests, flat, rows or [len(flat) - 1])
            for at, token in zip(owners, self._best(logits), strict=False):
                best[at].append(token)
        return best

    def _take(
        self, left: list[tuple[int, SequenceId, list[int]]]
    ) -> list[tuple[int, SequenceId, list[int], int]]:
        """Cut the next step off ``left``: (index, sequence, tokens of the step, tokens that remain)."""
        step: list[tuple[int, SequenceId, list[int], int]] = []
        requests: list[tuple[SequenceId, int]] = []
        room = self._chunk
        while left and room:
            at, sequence, ids = left[0]
            count = min(room, len(ids))
            if requests and not self._cache.can_append([*requests, (sequence, count)]):
                break
            requests.append((sequence, count))
            step.append((at, sequence, ids[:count], len(ids) - count))
            room -= count
            if count < len(ids):
                left[0] = (at, sequence, ids[count:])
            else:
                left.pop(0)
        return step

    def _best(self, logits: np.ndarray) -> list[int]:
        tokens: list[int] = logits[:, : self._vocab].argmax(axis=-1).tolist()
        return tokens
