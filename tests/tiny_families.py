"""Tiny random checkpoints of every family: a ``config.json`` each; golden files hold the rest.

``scripts/make_family_goldens.py`` asks transformers which tensors such a checkpoint has, draws them as
here, and writes the logits with the names and shapes to ``tests/goldens/family_NAME.npz``.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from tiny_llama import byte_tokenizer

GOLDENS = Path(__file__).parent / "goldens"

#: Sizes of all of them, odd where nothing forbids it.
SIZES: dict[str, Any] = {
    "vocab_size": 290,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
#: Longer than two pages and two windows of the cases below, and no multiple of either.
TOKENS = 150
#: Around the start, the ends of windows and pages, and the last row.
ROWS = (0, 1, 31, 63, 64, 69, 70, 71, 127, 128, 140, 149)


@dataclass(frozen=True)
class TinyFamily:
    """A tiny checkpoint of a family.

    Attributes
    ----------
    model_type : str
        Of its ``config.json``.
    keys : dict
        What the file says beyond :data:`SIZES`.
    norm_mean : float
        Around which the weights of norms are drawn.
    tokens : int
        Length of its prompt.
    rows : tuple of int
        Rows whose logits the golden file holds.
    """

    model_type: str
    keys: dict[str, Any]
    norm_mean: float = 1.0
    tokens: int = TOKENS
    rows: tuple[int, ...] = ROWS

    def config(self) -> dict[str, Any]:
        """The ``config.json``."""
        return {"model_type": self.model_type, **SIZES, **self.keys}

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The float32 tensor ``name``, the same in every version of numpy."""
        values = np.random.RandomState([7, zlib.crc32(name.encode())]).standard_normal(shape)
        if len(shape) == 1:
            values = self.norm_mean + 0.2 * values if name.endswith("norm.weight") else 0.3 * values
        else:
            # sharp attention and clear choices of experts, so that what is wrong shows
            sharp = any(part in name for part in ("q_proj", "k_proj", "qkv_proj", "gate.weight"))
            values *= (1.6 if sharp else 1.0) / np.sqrt(shape[-1])
        return np.ascontiguousarray(values, dtype=np.float32)

    def prompt(self) -> np.ndarray:
        """Random token ids, int32 ``[tokens]``."""
        return np.random.RandomState(7).randint(0, SIZES["vocab_size"], self.tokens).astype(np.int32)

    def write(self, directory: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
        """Write the checkpoint with tensors of these names and shapes, and a byte tokenizer."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config()))
        tensors = {name: self.tensor(name, shape) for name, shape in shapes.items()}
        safetensors.numpy.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        byte_tokenizer().save(str(directory / "tokenizer.json"))
        return directory


def golden(name: str) -> tuple[np.lib.npyio.NpzFile, dict[str, tuple[int, ...]]]:
    """The golden file of a case, and the tensors of its checkpoint."""
    file = np.load(GOLDENS / f"family_{name}.npz")
    return file, {name: tuple(map(int, shape)) for name, shape in json.loads(str(file["shapes"])).items()}


_GEMMA = {
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_LONGROPE = {
    "short_factor": [1.0 + 0.05 * i for i in range(6)],
    "long_factor": [1.5 + 0.5 * i for i in range(6)],
}

#: One entry a family; Llama's are in ``tiny_llama.py``.
FAMILY_CASES: dict[str, TinyFamily] = {
    "mistral": TinyFamily("mistral", {"head_dim": 32, "rms_norm_eps": 1e-5, "sliding_window": 70}),
    "mixtral": TinyFamily(
        "mixtral",
        {"rms_norm_eps": 1e-5, "sliding_window": None, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "qwen2": TinyFamily(
        "qwen2",
        {"rms_norm_eps": 1e-6, "use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1},
    ),
    "qwen3": TinyFamily("qwen3", {"head_dim": 32, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}),
    "qwen3_moe": TinyFamily(
        "qwen3_moe",
        {
            "head_dim": 32,
            "rms_norm_eps": 1e-6,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "gemma": TinyFamily("gemma", {**_GEMMA}, norm_mean=0.0),
    "gemma2": TinyFamily(
        "gemma2",
        {
            **_GEMMA,
            "sliding_window": 70,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
        },
        norm_mean=0.0,
    ),
    "gemma3": TinyFamily(
        "gemma3_text",
        {
            **_GEMMA,
            "sliding_window": 70,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 24,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "max_position_embeddings": 4096,
        },
        norm_mean=0.0,
        tokens=2150,
        rows=(0, 1, 69, 70, 71, 128, 1000, 2048, 2149),
    ),
    "phi3": TinyFamily(
        "phi3",
        {
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.75,
            "sliding_window": 70,
            "original_max_position_embeddings": 128,
            "rope_scaling": {"type": "longrope", **_LONGROPE},
        },
    ),
    "smollm3": TinyFamily(
        "smollm3", {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "no_rope_layers": [1, 0]}
    ),
    "olmo2": TinyFamily("olmo2", {"rms_norm_eps": 1e-6}),
    "stablelm": TinyFamily(
        "stablelm", {"layer_norm_eps": 1e-5, "use_qkv_bias": True, "partial_rotary_factor": 0.25}
    ),
}


_SCALED = {"factor": 4.0, "original_max_position_embeddings": 512}

#: Keys of ``config.json`` on RoPE, and the context it is for: frequencies in ``tests/goldens/rope.json``.
ROPE_CASES: dict[str, tuple[dict[str, Any], int]] = {
    "none": ({"rope_theta": 5e5}, 512),
    "partial": ({"partial_rotary_factor": 0.25}, 512),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
    "dynamic within": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 300),
    "dynamic beyond": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 1500),
    "llama3": (
        {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_SCALED}},
        2048,
    ),
    "yarn": ({"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **_SCALED}}, 2048),
    "yarn with numbers": (
        {
            "rope_scaling": {
                "rope_type": "yarn",
                **_SCALED,
                "beta_fast": 16,
                "beta_slow": 2,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
                "truncate": False,
            },
            "partial_rotary_factor": 0.5,
        },
        2048,
    ),
    "longrope short": (
        {
            "rope_scaling": {"type": "longrope", **_LONGROPE},
            "original_max_position_embeddings": 128,
            "partial_rotary_factor": 0.375,
        },
        128,
    ),
    "longrope long": (
        {
            "rope_scaling": {"rope_type": "longrope", **_LONGROPE, "attention_factor": 1.25},
            "original_max_position_embeddings": 128,
            "partial_rotary_factor": 0.375,
        },
        129,
    ),
}
