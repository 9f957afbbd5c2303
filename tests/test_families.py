"""Every family: logits of compiled tiny checkpoints against those that transformers computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from test_golden_logits import TOLERANCE, build, run
from tiny_families import FAMILY_CASES, golden


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_logits(name: str, build_cache: Path, tmp_path: Path) -> None:
    """In one step, and in chunks with single rows between them, which go through ``decode``."""
    case, (expected, shapes) = FAMILY_CASES[name], golden(name)
    model = build(case.write(tmp_path, shapes), "q0f32", "none", build_cache, context=case.tokens)
    for chunks in ([case.tokens], [case.tokens // 2 - 6, 1, 1, 64]):
        found = run(model, expected["tokens"], chunks)[expected["rows"]]
        assert np.abs(found - expected["logits"]).max() < TOLERANCE


def test_weights_in_four_bits(build_cache: Path, tmp_path: Path) -> None:
    """Norms of 1 + w and scaled, tied embeddings: the error is that of four bits, not of a mistake."""
    case, (expected, shapes) = FAMILY_CASES["gemma2"], golden("gemma2")
    model = build(case.write(tmp_path, shapes), "q4f16_1", "int4", build_cache, context=case.tokens)
    found = run(model, expected["tokens"], [100, 1, 49])[expected["rows"]]
    error = np.sqrt(np.square(found - expected["logits"]).mean()) / expected["logits"].std()
    assert 0.01 < error < 0.3
