"""Twenty users of 2,100 tokens in the bytes that an fp16 cache needs for four of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from checkpoints import write_tiny_llama
from kvq.build import prepare_model
from kvq.engine.core import EngineCore
from kvq.engine.request import Request
from kvq.memory import kv_layout
from kvq.memory_budget import fit_cache
from kvq.quantization.scheme import resolve
from kvq.runtime.library import Library
from kvq.runtime.loaded_model import LoadedModel
from kvq.runtime.sampler import SamplingParams
from test_engine_batch import Nothing

PROMPT, ANSWER, USERS, CHUNK = 2000, 100, 20, 512
CONTEXT = 2112


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_llama(tmp_path_factory.mktemp("tiny"), vocab_size=264, num_layers=1)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    return path


def answers(core: EngineCore, requests: list[Request]) -> tuple[list[list[int]], int]:
    """Tokens of each request, and how many ran at once at most."""
    indices = [core.add(request) for request in requests]
    tokens: dict[int, list[int]] = {index: [] for index in indices}
    most = 0
    while core.has_work:
        for index, piece in core.step():
            assert piece.token is not None and piece.error is None
            tokens[index].append(piece.token.id)
        most = max(most, core.stats().running)
    core.check_integrity()
    assert core.stats().used_pages == 0
    return [tokens[index] for index in indices], most


@pytest.mark.slow
@pytest.mark.parametrize(("kv", "least", "most"), [("none", 4, 4), ("int4", 13, 20), ("int3", 16, 20)])
def test_users_who_run_at_once(checkpoint: Path, build_cache: Path, kv: str, least: int, most: int) -> None:
    built = prepare_model(checkpoint, "q4f16_1", kv, cache_dir=build_cache)
    library = Library.load(built.library)
    meta = library.metadata
    fp16 = kv_layout(meta.model, *resolve("q4f16_1", "none"))
    budget = 4 * (fp16.pages_for(CONTEXT) * fp16.page_bytes + fp16.open_page_bytes)
    shape, plan = fit_cache(
        meta.model,
        meta.layout,
        weights_bytes=0,
        context_window_size=CONTEXT,
        prefill_chunk_size=CHUNK,
        max_batch_size=1,
        budget=budget * 2,
        scratch_slots=meta.scratch_slots,
    )
    rest = plan.total_bytes - plan.kv_sealed_bytes - plan.kv_open_bytes
    logits = 4 * meta.model.vocab_size
    # Of all numbers of sequences the one that an engine would choose, had it these bytes for its cache alone.
    for sequences in range(1, USERS + 1):
        found, plan = fit_cache(
            meta.model,
            meta.layout,
            weights_bytes=0,
            context_window_size=CONTEXT,
            prefill_chunk_size=CHUNK,
            max_batch_size=sequences,
            budget=rest + budget + (sequences - 1) * logits,
            scratch_slots=meta.scratch_slots,
        )
        if found.num_open < sequences:
            break
        shape = found
    assert shape.sealed_bytes(meta.layout) + shape.open_bytes(meta.layout) <= budget
    model = LoadedModel(library, library.load_params(built.weights_dir), shape, CHUNK)
    core = EngineCore(
        model,
        Nothing,
        context_window_size=CONTEXT,
        prefill_chunk_size=CHUNK,
        vocab_size=260,
        prefix_cache=False,
    )
    random = np.random.RandomState(0)
    requests = [
        Request(random.randint(3, 250, PROMPT).tolist(), SamplingParams(temperature=0), max_tokens=ANSWER)
        for _ in range(USERS)
    ]
    together, at_once = answers(core, requests)
    assert least <= at_once <= most
    assert all(len(tokens) == ANSWER for tokens in together)
    assert together == [answers(core, [request])[0][0] for request in requests]
