"""Compiled models with windows: sliding layers beside full ones, and all of them in a small pool."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fake_model import FakeStream
from golden_run import run
from kvq.engine.core import EngineCore
from kvq.engine.request import Request
from kvq.errors import ConfigError
from kvq.runtime.cache_shape import CacheShape
from kvq.runtime.loaded_model import LoadedModel
from kvq.runtime.sampler import SamplingParams
from test_golden_logits import build
from tiny_families import FAMILY_CASES, TinyFamily, golden

CONTEXT, WINDOW, PAGE = 420, 70, 64


def tokens(case: TinyFamily, count: int) -> np.ndarray:
    return np.resize(case.prompt(), count)


def test_full_and_sliding_layers_in_one_model(build_cache: Path, tmp_path: Path) -> None:
    """Gemma 2 over quantized pages: the same bits however the tokens come, and not those of fewer tokens."""
    case = FAMILY_CASES["gemma2"]
    model = build(case.write(tmp_path, golden("gemma2")[1]), "q0f32", "int3", build_cache, CONTEXT)
    windows = [layer.window for layer in model.metadata.model.layer_attention]
    assert windows == [WINDOW, None] and model.cache.window is None
    prompt = tokens(case, CONTEXT - 20)
    whole = run(model, prompt, [len(prompt)])
    for chunks in ([64, 1, 1, 130], [197, 3]):
        assert np.array_equal(run(model, prompt, chunks), whole)
    cut = run(model, prompt[PAGE:], [len(prompt)])
    assert np.abs(cut[-1] - whole[-1]).max() > 1e-3  # the full layer sees the first page


def greedy(model: LoadedModel, prompt: np.ndarray, count: int) -> list[int]:
    """What a model says to a prompt, in a pool that holds it all."""
    model.cache.add_sequence("greedy")
    drawn = [int(model.step([("greedy", len(prompt))], prompt)[0].argmax())]
    while len(drawn) < count:
        drawn.append(int(model.step([("greedy", 1)], drawn[-1:])[0].argmax()))
    model.cache.remove_sequence("greedy")
    return drawn


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_layers_that_all_slide_need_the_pages_of_a_window(
    prefix_cache: bool, build_cache: Path, tmp_path: Path
) -> None:
    """Two requests of six pages each in a pool of four; one must wait or come back, and both are right."""
    case = FAMILY_CASES["mistral"]
    full = build(case.write(tmp_path, golden("mistral")[1]), "q0f32", "none", build_cache, CONTEXT)
    assert full.cache.window == WINDOW
    shape = CacheShape(num_pages=4, num_open=2, num_workspace=2)
    core = EngineCore(
        LoadedModel(full.library, full.params, shape, 2 * PAGE),
        FakeStream,
        context_window_size=CONTEXT,
        prefill_chunk_size=2 * PAGE,
        vocab_size=full.metadata.model.vocab_size,
        prefix_cache=prefix_cache,
    )
    prompts = [tokens(case, 380), tokens(case, 300)[::-1].copy()]
    sampling = SamplingParams(temperature=0)
    expected = {
        core.add(Request(prompt.tolist(), sampling, max_tokens=30)): greedy(full, prompt, 30)
        for prompt in prompts
    }
    drawn: dict[int, list[int]] = {index: [] for index in expected}
    while core.has_work:
        for index, piece in core.step():
            assert piece.token is not None
            drawn[index].append(piece.token.id)
        core.check_integrity()
    assert drawn == expected
    with pytest.raises(ConfigError, match="context window 420"):
        core.check(Request([1] * CONTEXT, sampling, max_tokens=1))
