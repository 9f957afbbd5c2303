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
