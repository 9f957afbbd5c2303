"""Many requests on a compiled model: batched, chunked, on a prefix hit, preempted: the bits of a solo run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import write_tiny_llama
from kvq.build import BuiltModel, prepare_model
from kvq.engine.core import EngineCore
from kvq.engine.request import Request
from kvq.runtime.cache_shape import CacheShape
from kvq.runtime.library import Library, Params
from kvq.runtime.loaded_model import LoadedModel
from kvq.runtime.random_params import random_params
from kvq.runtime.sampler import SamplingParams

CONTEXT, CHUNK = 448, 128


class Recorder:
    """A model that keeps the logits of every drawn token by request and length of its sequence."""

    def __init__(self, model: LoadedModel) -> None:
        self.model, self.cache, self.faults = model, model.cache, model.faults
        self.logits: dict[tuple[int, int], np.ndarray] = {}
        self.batches: list[list[int]] = []

    def can_draw(self, params: SamplingParams) -> bool:
        return False

    def step(
        self, requests: list[tuple[Any, int]], ids: Any, logit_rows: list[int] | None = None, **options: Any
    ) -> np.ndarray:
        logits = self.model.step(requests, ids, logit_rows, **options)
        self.batches.append([count for _, count in requests])
        ends = np.cumsum([count for _, count in requests]) - 1
        wanted = ends.tolist() if logit_rows is None else logit_rows
        for row, end in enumerate(wanted):
            index = int(np.searchsorted(ends, end))
            if ends[index] == end:
                sequence = requests[index][0]
                self.logits[sequence, self.cache.length(sequence)] = logits[row].copy()
        return logits


@pytest.fixture(scope="module")
def loaded(build_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Library, Params]:
    checkpoint = write_tiny_llama(tmp_path_factory.mktemp("tiny"), vocab_size=264)
    built: BuiltModel = prepare_model(checkpoint, "q4f16kv", cache_dir=build_cache)
    library = Library.load(built.library)
    return library, library.load_params(built.weights_dir)


class Nothing:
    """A detokenizer without text."""

    def put(self, index: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def make(
    loaded: tuple[Library, Params], pages: int, num_open: int, chunk: int = CHUNK, prefix: bool = True
) -> tuple[EngineCore, Recorder]:
    library, params = loaded
    layout = library.metadata.layout
    shape = CacheShape(pages, num_open, max(1, layout.workspace_pages_for(chunk)))
    model = Recorder(LoadedModel(library, params, shape, chunk))
    core = EngineCore(
        model,
        Nothing,
        context_window_size=CONTEXT,
        prefill_chunk_size=chunk,
        vocab_size=260,
        prefix_cache=prefix,
    )
    return core, model


def run(core: EngineCore, requests: list[Request], every: int = 0) -> dict[int, list[int]]:
    """Run requests, one more every so many steps (0: all at once); tokens by index of the request."""
    tokens: dict[int, list[int]] = {}
    left: Iterator[Request] = iter(requests)
    indices: list[int] = []
    steps = 0
    while len(indices) < len(requests) or core.has_work:
        while len(indices) < len(requests) and (not every or steps % every == 0):
            indices.append(core.add(next(left)))
            if every:
                break
        for index, piece in core.step():
            assert piece.token is not None
            tokens.setdefault(index, []).append(piece.token.id)
        core.check_integrity()
        steps += 1
    return {number: tokens[index] for number, index in enumerate(indices)}


def ids(count: int, seed: int) -> list[int]:
    return np.random.RandomState(seed).randint(3, 250, count).tolist()


def some_requests() -> list[Request]:
    """Shared, partly shared and unique prompts; greedy and drawn."""
    shared = ids(200, 0)
    prompts = [
        shared,
        shared + ids(30, 1),
        shared[:100] + ids(50, 2),
        ids(64, 3),
        ids(1, 4),
        ids(129, 5),
        shared,
        shared[:150],
    ]
    return [
        Request(prompt, SamplingParams(temperature=[0.0, 1.0][i % 2], seed=i), max_tokens=120 + 5 * i)
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def solo(loaded: tuple[Library, Params]) -> tuple[dict[int, list[int]], dict[tuple[int, int], np.ndarray]]:
    """Each request by itself in an empty cache."""
    core, model = make(loaded, 7, 1, prefix=False)
    tokens: dict[int, list[int]] = {}
    for number, request in enumerate(some_requests()):
        tokens[number] = run(core, [request])[0]
    assert max(len(batch) for batch in model.batches) == 1
    return tokens, model.logits


@pytest.mark.parametrize(
    ("pages", "num_open", "chunk", "prefix", "every"),
    [
        (60, 8, CHUNK, False, 0),
        (60, 8, CHUNK, True, 3),
        (60, 3, 33, True, 5),
        (7, 8, CHUNK, True, 0),
        (7, 8, CHUNK, False, 0),
    ],
    ids=["batch", "prefix", "small chunks", "preempted", "preempted without prefix cache"],
)
def test_tokens_and_logits_are_those_of_a_solo_run(
    loaded: tuple[Library, Params], solo: Any, pages: int, num_open: int, chunk: int, prefix: bool, every: int
) -> None:
    core, model = make(loaded, pages, num_open, chunk, prefix)
    tokens = run(core, some_requests(), every)
    assert tokens == solo[0]
    lengths = {number: len(request.prompt) for number, request in enumerate(some_requests())}
    drawn = {key for key in solo[1] if key[1] >= lengths[key[0]]}
    assert len(drawn) == sum(map(len, tokens.values()))
    assert all(np.array_equal(model.logits[key], solo[1][key]) for key in drawn)
    stats = core.stats()
    assert (stats.preemptions > 0) == (pages == 7) and stats.used_pages == 0
    assert (stats.hit_tokens > 0) == prefix
    assert any(len(batch) > 1 and max(batch) > 1 and min(batch) == 1 for batch in model.batches)


def test_the_same_prompt_three_times_and_a_b_a(loaded: tuple[Library, Params], solo: Any) -> None:
    core, _ = make(loaded, 12, 2)
    requests = some_requests()
    for number in (0, 0, 0, 5, 0, 2, 0):
        assert run(core, [requests[number]])[0] == solo[0][number]
    assert core.stats().hit_tokens == 4 * 192 + 64


def test_parents_go_before_their_children(loaded: tuple[Library, Params], solo: Any) -> None:
    """The request that computed a prefix is cancelled while others run on its pages."""
    core, _ = make(loaded, 30, 4)
    requests = some_requests()
    parent = core.add(requests[0])
    core.step()
    core.step()
    children = [core.add(requests[n]) for n in (6, 1)]
    tokens: dict[int, list[int]] = {}
    core.step()
    assert core.stats().hit_tokens == 2 * 192
    core.cancel(parent)
    for _ in range(300):
        for index, piece in core.step():
            tokens.setdefault(index, []).append(piece.token.id)  # type: ignore[union-attr]
        core.check_integrity()
    assert tokens[children[0]] == solo[0][6][1:] and tokens[children[1]] == solo[0][1][1:]


def test_weights_can_be_made_up(loaded: tuple[Library, Params]) -> None:
    """For speed alone: of the library's shapes, with logits that are numbers, and a likeliest token."""
    library, params = loaded
    made = random_params(library)
    assert made.nbytes == params.nbytes
    limits = {"context_window_size": CONTEXT, "max_batch_size": 1, "prefill_chunk_size": CHUNK}
    shape = CacheShape.for_limits(library.metadata.layout, **limits)
    logits = {}
    for name, weights in (("made", made), ("stored", params)):
        model = LoadedModel(library, weights, shape, CHUNK)
        model.cache.add_sequence("a")
        logits[name] = np.array(model.step([("a", 3)], [1, 2, 3]))
        assert np.isfinite(logits[name]).all()
        model.cache.popn("a", 1)
        found = model.likeliest([("a", 1)], [3])
        assert found.dtype == np.int32 and found.tolist() == logits[name].argmax(axis=1).tolist()
    assert not np.allclose(logits["made"], logits["stored"])
