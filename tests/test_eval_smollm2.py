"""What the cache costs SmolLM2 on the prose that ships with kvq: the promise of the formats, measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvq.eval.perplexity import REFERENCE
from kvq.eval.run import evaluate_perplexity
from kvq.eval.text import DEFAULT_TEXT


@pytest.mark.slow
def test_perplexity_of_int4_and_int3(
    demo_gguf: Path, build_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVQ_CACHE", str(build_cache))
    exact, none, int4, int3 = evaluate_perplexity(
        str(demo_gguf),
        [REFERENCE, "none", "int4", "int3"],
        DEFAULT_TEXT,
        max_tokens=8200,
        window=1024,
        chunk=256,
    )
    assert exact["scored_tokens"] >= 8000
    assert 0 < none["kl"] < 1e-4
    assert int4["delta_percent"] < 2.0
    assert int3["delta_percent"] < 6.0
    assert 0 < int4["kl"] < int3["kl"]
    assert int4["quantized_keys"] > 0.9 * int4["keys"]
