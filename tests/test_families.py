"""Every family: logits of compiled tiny checkpoints against those that transformers computed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import vulkan_runner
from golden_run import TOLERANCE, run
from kvq.convert import convert_weight
from kvq.errors import CheckpointError
from kvq.loader import TensorCache, open_checkpoint
from kvq.loader.check import check_tensors
from kvq.loader.hf_config import model_config_from_hf
from kvq.model.parameters import model_parameters
from kvq.quantization.scheme import WEIGHT_SCHEMES
from kvq.quantization.weights import stored_parameters
from test_golden_logits import build
from tiny_families import FAMILY_CASES, TinyFamily, golden

#: On Vulkan those with something of their own: experts, soft-capping, norms with a mean.
ON_VULKAN = ("mixtral", "gemma2", "stablelm")


@pytest.mark.parametrize(
    ("name", "device"), [*((name, "cpu") for name in FAMILY_CASES), *((name, "vulkan") for name in ON_VULKAN)]
)
def test_logits(name: str, device: str, build_cache: Path, tmp_path: Path) -> None:
    """In one step, and in chunks with single rows between them, which go through ``decode``."""
    if device == "vulkan" and (reason := vulkan_runner.missing()):
        pytest.skip(reason)
    case, (expected, shapes) = FAMILY_CASES[name], golden(name)
    checkpoint = case.write(tmp_path, shapes)
    model = build(checkpoint, "q0f32", "none", build_cache, case.tokens, device)
    for chunks in ([case.tokens], [case.tokens // 2 - 6, 1, 1, 64]):
        found = run(model, expected["tokens"], chunks)[expected["rows"]]
        assert np.abs(found - expected["logits"]).max() < TOLERANCE


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_conversion(name: str, tmp_path: Path) -> None:
    """Every weight scheme stores what the library takes; norms and biases are those of the checkpoint."""
    case, (_, shapes) = FAMILY_CASES[name], golden(name)
    checkpoint = case.write(tmp_path / "in", shapes)
    config = model_config_from_hf(case.config(), checkpoint / "config.json")
    for scheme in ("q4f16_1", "q0f16"):
        convert_weight(checkpoint, scheme, tmp_path / scheme)
        stored = TensorCache(tmp_path / scheme)
        wanted = stored_parameters(config, WEIGHT_SCHEMES[scheme])
        assert {t.name: (t.shape, t.dtype) for t in wanted} == {n: stored.describe(n) for n in stored.names}
        norm = stored.read("model.norm.weight")
        offset = 1 - case.norm_mean  # norms of mean 0 are stored less one
        expected = case.tensor("model.norm.weight", norm.shape) + np.float32(offset)
        np.testing.assert_array_equal(norm, expected.astype(np.float16))


def check(case: TinyFamily, shapes: dict[str, tuple[int, ...]], directory: Path) -> str | None:
    """What is said of a checkpoint with these tensors, if anything."""
    with open_checkpoint(case.write(directory, shapes)) as checkpoint:
        try:
            check_tensors(checkpoint, model_parameters(checkpoint.config))
        except CheckpointError as error:
            return str(error)
    return None


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_tied_or_not_and_with_or_without_a_head(name: str, tmp_path: Path) -> None:
    case, (_, shapes) = FAMILY_CASES[name], golden(name)
    bare = {tensor: shape for tensor, shape in shapes.items() if tensor != "lm_head.weight"}
    headed = {**bare, "lm_head.weight": shapes["model.embed_tokens.weight"]}
    for tied in (True, False):
        one = replace(case, keys={**case.keys, "tie_word_embeddings": tied})
        assert check(one, headed, tmp_path) is None
        said = check(one, bare, tmp_path)
        assert said is None if tied else "lm_head.weight is missing" in str(said)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("qwen2", {"model_type": "mistral"}, "not used by the model: attention_bias"),
        (
            "qwen3",
            {"model_type": "mistral"},
            "k_norm.weight and 1 more are not used by the model: model_type",
        ),
        ("olmo2", {"model_type": "mistral"}, "model_type names another family"),
        ("phi3", {"model_type": "mistral"}, "model_type names another family"),
        ("mixtral", {"num_local_experts": 6}, "experts.5.w1.weight"),
        ("qwen3_moe", {"mlp_only_layers": []}, "layers have them"),
        ("qwen3_moe", {"moe_intermediate_size": 32}, "makes it [32, 96] (moe_intermediate_size 32"),
        ("gemma3", {"head_dim": 64}, "q_proj.weight has shape [192, 96]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    name: str, changes: dict[str, object], expected: str, tmp_path: Path
) -> None:
    case, (_, shapes) = FAMILY_CASES[name], golden(name)
    model_type = str(changes.get("model_type", case.model_type))
    said = check(TinyFamily(model_type, {**case.keys, **changes}), shapes, tmp_path)
    assert said is not None and expected in said and "\n" not in said


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_model_of_a_checkpoint_with_more_parts(prefix: str, tmp_path: Path) -> None:
    """Gemma 3 with eyes: what is read is the same as of the language model alone."""
    case, (_, shapes) = FAMILY_CASES["gemma3"], golden("gemma3")
    alone = case.write(tmp_path / "alone", shapes)
    seeing = case.write(tmp_path / "seeing", shapes)
    text = {key: value for key, value in case.config().items() if key != "model_type"}
    (seeing / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    tensors = {name.replace("model.", prefix, 1): case.tensor(name, shape) for name, shape in shapes.items()}
    eye = np.zeros((4, 4), np.float32)
    safetensors.numpy.save_file(
        {**tensors, "vision_tower.head.weight": eye, "multi_modal_projector.weight": eye},
        seeing / "model.safetensors",
    )
    with open_checkpoint(alone) as one, open_checkpoint(seeing) as other:
        assert one.config == other.config
        check_tensors(other, model_parameters(other.config))
        for name in shapes:
            np.testing.assert_array_equal(one.tensor(name, 1, 40), other.tensor(name, 1, 40))
