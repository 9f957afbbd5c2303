"""Tiny random Llama checkpoints: the same weights for the golden files and for the tests that meet them.

A tensor depends on the seed and its own name alone, drawn from the frozen legacy generator of numpy, so
that golden files stay valid whatever the order, the storage or the version of numpy.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers


@dataclass(frozen=True)
class TinyLlama:
    """A tiny Llama architecture and the seed of its weights.

    Attributes
    ----------
    gqa : int
        Query heads per KV head.
    rope_scaling : dict
        As in ``config.json``; empty for none.
    """

    seed: int
    gqa: int = 3
    head_dim: int = 64
    tied: bool = True
    bias: bool = False
    num_kv_heads: int = 2
    num_layers: int = 2
    hidden_size: int = 192
    intermediate_size: int = 224
    vocab_size: int = 320
    rope_scaling: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        """The ``config.json`` of the checkpoint, as Hugging Face writes it."""
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.gqa * self.num_kv_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": self.tied,
            "attention_bias": self.bias,
            "mlp_bias": self.bias,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if self.rope_scaling:
            config["rope_scaling"] = self.rope_scaling
        return config

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor, by the names of Hugging Face."""
        hidden, inter = self.hidden_size, self.intermediate_size
        q_out, kv_out = self.gqa * self.num_kv_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for i in range(self.num_layers):
            layer = f"model.layers.{i}"
            for name, n, k in (
                ("self_attn.q_proj", q_out, hidden),
                ("self_attn.k_proj", kv_out, hidden),
                ("self_attn.v_proj", kv_out, hidden),
                ("self_attn.o_proj", hidden, q_out),
                ("mlp.gate_proj", inter, hidden),
                ("mlp.up_proj", inter, hidden),
                ("mlp.down_proj", hidden, inter),
            ):
                shapes[f"{layer}.{name}.weight"] = (n, k)
                if self.bias:
                    shapes[f"{layer}.{name}.bias"] = (n,)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{layer}.{norm}.weight"] = (hidden,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def tensor(self, name: str) -> np.ndarray:
        """The float32 tensor ``name``: norms near 1, biases near 0, matrices that keep the variance.

        Queries and keys are drawn wider, so that attention is sharp enough for a wrong key to show.
        """
        shape = self.shapes()[name]
        values = np.random.RandomState([self.seed, zlib.crc32(name.encode())]).standard_normal(shape)
        if len(shape) == 1:
            values = 1.0 + 0.2 * values if name.endswith("norm.weight") else 0.3 * values
        else:
            gain = 1.6 if "q_proj" in name or "k_proj" in name else 1.0
            values *= gain / np.sqrt(shape[1])
        if name == "model.embed_tokens.weight" and not self.tied:
            values *= np.sqrt(shape[1])
        return np.ascontiguousarray(values, dtype=np.float32)

    def tensors(self) -> dict[str, np.ndarray]:
        """Every tensor of the checkpoint."""
        return {name: self.tensor(name) for name in self.shapes()}

    def write(self, directory: Path) -> Path:
        """Write the checkpoint as Hugging Face does, with a byte tokenizer and a chat template."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config()))
        safetensors.numpy.save_file(self.tensors(), directory / "model.safetensors")
        byte_tokenizer().save(str(directory / "tokenizer.json"))
        template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}assistant: "
        names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
        (directory / "tokenizer_config.json").write_text(json.dumps(names))
        return directory

    def prompt(self, num_tokens: int) -> np.ndarray:
        """Random token ids, int32 ``[num_tokens]``."""
        rng = np.random.RandomState([self.seed, num_tokens])
        return rng.randint(0, self.vocab_size, num_tokens).astype(np.int32)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A token a byte, after ``<unk>``, ``<s>`` and ``</s>``: 259 tokens."""
    special = ["<unk>", "<s>", "</s>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


#: The architectures that golden files exist for (``tests/goldens/tiny_NAME.npz``).
GOLDEN_CASES: dict[str, TinyLlama] = {
    "gqa1_d64_tied": TinyLlama(seed=1, gqa=1, head_dim=64, tied=True),
    "gqa3_d64_untied": TinyLlama(seed=2, gqa=3, head_dim=64, tied=False),
    "gqa4_d128_untied_bias": TinyLlama(seed=3, gqa=4, head_dim=128, tied=False, bias=True),
    "gqa8_d80_tied_bias": TinyLlama(seed=4, gqa=8, head_dim=80, tied=True, bias=True, num_kv_heads=1),
    "gqa1_d96_untied": TinyLlama(seed=5, gqa=1, head_dim=96, tied=False),
    "gqa3_d80_untied": TinyLlama(seed=6, gqa=3, head_dim=80, tied=False, num_kv_heads=1),
    "gqa4_d96_tied_bias": TinyLlama(seed=7, gqa=4, head_dim=96, tied=True, bias=True),
    "gqa8_d128_tied": TinyLlama(seed=8, gqa=8, head_dim=128, tied=True),
    "rope_linear": TinyLlama(seed=9, rope_scaling={"type": "linear", "factor": 4.0}),
    "rope_llama3": TinyLlama(
        seed=10,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
}
