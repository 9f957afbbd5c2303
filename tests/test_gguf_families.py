"""GGUF files of every architecture give the configuration and the tensors of the Hugging Face checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map

from checkpoints import permute
from kvq.config import ModelConfig
from kvq.errors import ConfigError
from kvq.loader import open_checkpoint
from kvq.loader.check import check_tensors
from kvq.loader.gguf_names import ARCHITECTURES
from kvq.loader.hf_config import model_config_from_hf
from kvq.model.parameters import model_parameters
from tiny_families import FAMILY_CASES, golden

#: Architecture of each case, and what GGUF has no key for: llama.cpp takes it for granted.
CASES: dict[str, tuple[MODEL_ARCH, dict[str, Any]]] = {
    "mixtral": (MODEL_ARCH.LLAMA, {}),
    "qwen2": (MODEL_ARCH.QWEN2, {"sliding_window": None, "layer_types": None}),
    "qwen3": (MODEL_ARCH.QWEN3, {}),
    "qwen3_moe": (MODEL_ARCH.QWEN3MOE, {}),
    "gemma": (MODEL_ARCH.GEMMA, {"query_pre_attn_scalar": None}),
    "gemma2": (MODEL_ARCH.GEMMA2, {"query_pre_attn_scalar": 32}),
    "gemma3": (MODEL_ARCH.GEMMA3, {"query_pre_attn_scalar": 32}),
    "phi3": (MODEL_ARCH.PHI3, {}),
    "smollm3": (MODEL_ARCH.SMOLLM3, {"rope_layers": (True, True)}),
    "olmo2": (MODEL_ARCH.OLMO2, {}),
    "stablelm": (MODEL_ARCH.STABLELM, {}),
}
#: Whose q and k llama.cpp's converter reorders.
PERMUTED = ("mixtral", "smollm3")
_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_EXPERT_PARTS = {
    **{"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"},
    **{"gate_proj": "ffn_gate_exps", "down_proj": "ffn_down_exps", "up_proj": "ffn_up_exps"},
}


def add_metadata(writer: GGUFWriter, name: str, config: ModelConfig) -> None:
    """What llama.cpp's converter writes."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.rotary_dim or config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    add_eps = writer.add_layer_norm_eps if config.norm_type == "layer_norm" else writer.add_layer_norm_rms_eps
    add_eps(config.rms_norm_eps)
    if config.sliding_window and name != "qwen2":
        writer.add_sliding_window(config.sliding_window)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if name == "gemma3":
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
    if config.num_experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    if scaling.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        for kind in ("long", "short"):
            factors = np.array(scaling[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)


def write(path: Path, name: str) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Write a tiny case, its tensors named by the reference library; its configuration and tensors."""
    case, (arch, _) = FAMILY_CASES[name], CASES[name]
    config = model_config_from_hf(case.config(), Path("config.json"))
    tensors = {tensor: case.tensor(tensor, shape) for tensor, shape in golden(name)[1].items()}
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[arch])
    add_metadata(writer, name, config)
    spelled, experts = get_tensor_name_map(arch, config.num_hidden_layers), {}
    for tensor, values in tensors.items():
        if match := _EXPERT.match(tensor):
            layer, expert, part = match.groups()
            experts.setdefault((layer, _EXPERT_PARTS[part]), {})[int(expert)] = values
            continue
        # of Qwen3-MoE's feed-forward layers without experts the reference library knows nothing
        by_arch = (
            get_tensor_name_map(MODEL_ARCH.QWEN3, 2) if ".mlp." in tensor and name == "qwen3_moe" else None
        )
        found = spelled.get_name(tensor, try_suffixes=(".weight", ".bias")) or (
            by_arch and by_arch.get_name(tensor, try_suffixes=(".weight",))
        )
        assert found, tensor
        if name.startswith("gemma") and tensor.endswith("norm.weight"):
            values = values + 1
        if name in PERMUTED and ("q_proj" in tensor or "k_proj" in tensor):
            heads = config.num_attention_heads if "q_proj" in tensor else config.num_key_value_heads
            values = permute(values, heads)
        writer.add_tensor(found, np.ascontiguousarray(values, np.float32))
    for (layer, part), parts in experts.items():
        writer.add_tensor(f"blk.{layer}.{part}.weight", np.stack([parts[e] for e in sorted(parts)]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config, tensors


def test_every_architecture_has_a_case() -> None:
    assert {MODEL_ARCH_NAMES[arch] for arch, _ in CASES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", CASES)
def test_a_family_in_gguf(name: str, tmp_path: Path) -> None:
    config, tensors = write(tmp_path / "model.gguf", name)
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        expected = config.model_copy(update=CASES[name][1]).model_dump()
        found = checkpoint.config.model_dump()
        different = {key: (value, found[key]) for key, value in expected.items() if found[key] != value}
        assert not different
        check_tensors(checkpoint, model_parameters(checkpoint.config))
        assert set(checkpoint.tensor_names()) == set(tensors)
        for tensor, values in tensors.items():
            np.testing.assert_allclose(checkpoint.tensor(tensor), values, rtol=0, atol=2e-7, err_msg=tensor)
            if values.ndim > 1:
                np.testing.assert_array_equal(checkpoint.tensor(tensor, 3, 5), values[3:5], err_msg=tensor)


def test_scores_of_the_widest_gemmas_are_scaled_by_their_width(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "gemma2")
    config = model_config_from_hf(FAMILY_CASES["gemma2"].config(), path)
    add_metadata(writer, "gemma2", config.model_copy(update={"num_hidden_layers": 46}))
    writer.add_tensor("token_embd.weight", np.ones((10, 96), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config.query_pre_attn_scalar == 96 / 6


def test_experts_that_all_tokens_share_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "qwen3moe")
    add_metadata(writer, "qwen3_moe", model_config_from_hf(FAMILY_CASES["qwen3_moe"].config(), path))
    writer.add_expert_shared_count(1)
    writer.add_tensor("token_embd.weight", np.ones((10, 96), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"model\.gguf: experts that all tokens share"):
        open_checkpoint(path)
