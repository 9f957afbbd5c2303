"""RoPE frequencies of every kind of scaling against those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from checkpoints import edit_json, write_tiny_llama
from kvq.cli.main import main
from kvq.errors import CompileError, ConfigError
from kvq.loader.hf_config import model_config_from_hf
from kvq.model.rope import describe_fixed_rope, fix_rope, rope_parameters
from tiny_families import GOLDENS, ROPE_CASES, SIZES

EXPECTED = json.loads((GOLDENS / "rope.json").read_text())


def config_of(keys: dict[str, object]) -> dict[str, object]:
    return {"model_type": "llama", **SIZES, "head_dim": 32, "rms_norm_eps": 1e-5, **keys}


@pytest.mark.parametrize("name", ROPE_CASES)
def test_frequencies(name: str) -> None:
    keys, context = ROPE_CASES[name]
    model = fix_rope(model_config_from_hf(config_of(keys), Path("config.json")), context)
    assert fix_rope(model, 10 * context) == model  # what is fixed stays
    frequency, attention = rope_parameters(
        model.rope_theta, model.rotary_dim or model.head_dim, model.rope_scaling
    )
    np.testing.assert_allclose(frequency, EXPECTED[name]["inverse_frequency"], rtol=1e-5)
    assert attention == pytest.approx(EXPECTED[name]["attention_factor"])


def test_kinds_that_depend_on_the_length_are_said_to_be_fixed() -> None:
    said = {}
    for name, (keys, context) in ROPE_CASES.items():
        model = model_config_from_hf(config_of(keys), Path("config.json"))
        said[name] = describe_fixed_rope(model, context)
        if said[name]:
            with pytest.raises(CompileError, match="depends on the length"):
                rope_parameters(model.rope_theta, model.rotary_dim or 32, model.rope_scaling)
    assert {name for name, line in said.items() if line} == {
        *("dynamic within", "dynamic beyond", "longrope short", "longrope long")
    }
    assert "fixed for the context of 128 tokens" in str(said["longrope short"])
    assert "short factors" in str(said["longrope short"]) and "long factors" in str(said["longrope long"])


def test_factors_that_do_not_fit_the_head_are_refused() -> None:
    keys, _ = ROPE_CASES["longrope short"]
    with pytest.raises(ConfigError, match="'short_factor' must be a list of 16 numbers"):
        model_config_from_hf(config_of({**keys, "partial_rotary_factor": 1.0}), Path("config.json"))


def test_gen_config_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = write_tiny_llama(tmp_path / "in")
    edit_json(checkpoint / "config.json", rope_scaling={"type": "dynamic", "factor": 2.0})
    arguments = ["gen_config", str(checkpoint), "-q", "q0f16", "-o", str(tmp_path / "out")]
    assert main([*arguments, "--context-window-size", "2000"]) == 0
    said = capsys.readouterr().err
    assert "RoPE scaling 'dynamic' is fixed for the context of 2000 tokens" in said
