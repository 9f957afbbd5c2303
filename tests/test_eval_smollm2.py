"""What the cache costs SmolLM2 on the prose that ships with kvq: the promise of the formats, measured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq.build import prepare_model
from kvq.eval.perplexity import REFERENCE
from kvq.eval.run import evaluate_perplexity
from kvq.eval.text import DEFAULT_TEXT, read_text
from kvq.tokenizer import Tokenizer

GOLDEN = json.loads((Path(__file__).parent / "goldens" / "smollm2_perplexity.json").read_text())
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(demo_gguf: Path, build_cache: Path) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVQ_CACHE", str(build_cache))
        yield str(demo_gguf)


def evaluate(model: str, schemes: list[str], window: int) -> list[dict[str, Any]]:
    return evaluate_perplexity(
        model,
        schemes,
        DEFAULT_TEXT,
        quantization="q0f32",
        max_tokens=GOLDEN["tokens"],
        window=window,
        chunk=256,
    )


@pytest.fixture(scope="module")
def rows(model: str) -> list[dict[str, Any]]:
    return evaluate(model, [REFERENCE, "int4", "int3"], 1024)


def test_the_tokens_are_those_of_the_golden_file(model: str) -> None:
    tokenizer = Tokenizer.from_dir(prepare_model(model, "q0f32", REFERENCE, opt="O1").config_dir)
    tokens = np.array(tokenizer.encode(read_text(DEFAULT_TEXT))[: GOLDEN["tokens"]], np.int32)
    assert hashlib.sha256(tokens.tobytes()).hexdigest() == GOLDEN["sha256"]


@pytest.mark.parametrize("window", [1024, 2048])
def test_perplexity_without_rounding_is_that_of_transformers(
    model: str, rows: list[dict[str, Any]], window: int
) -> None:
    (exact,) = rows[:1] if window == 1024 else evaluate(model, [REFERENCE], window)
    golden = GOLDEN["windows"][str(window)]
    assert exact["scored_tokens"] == golden["scored"]
    assert exact["perplexity"] == pytest.approx(golden["perplexity"], rel=1e-3)


def test_the_loss_of_each_scheme(rows: list[dict[str, Any]]) -> None:
    _, int4, int3 = rows
    assert 0 < int4["kl"] < 0.008
    assert int4["kl"] < int3["kl"] < 0.032
    assert int4["top1_percent"] > 94.5
    assert int3["top1_percent"] > 90
    assert int4["delta_percent"] < 1.5 + int4["delta_stderr"]
    assert int3["delta_percent"] < 4.5 + int3["delta_stderr"]
    assert int4["quantized_keys"] > 0.9 * int4["keys"]
