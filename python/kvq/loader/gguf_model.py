"""What a GGUF file says about its model: architecture, and tensors under Hugging Face's names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from kvq.config import ModelConfig, parse_config
from kvq.errors import CheckpointError, ConfigError
from kvq.loader.gguf_blocks import STORAGE_OF
from kvq.loader.gguf_file import GGUFFile
from kvq.quantization.storage import PackedRows

#: Architectures (``general.architecture``) that can be read.
ARCHITECTURES = ("llama",)

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)$")
#: RoPE frequency factors of llama3 scaling; they become ``rope_scaling`` and are no weight.
_ROPE_FREQS = "rope_freqs.weight"


def hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a GGUF tensor; the name itself where it has none."""
    if gguf_name in _GLOBAL:
        return _GLOBAL[gguf_name]
    match = _BLOCK_NAME.match(gguf_name)
    if match and match[2] in _BLOCK:
        return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{match[3]}"
    return gguf_name


class GGUFModel:
    """A GGUF file read as a model.

    Attributes
    ----------
    file : GGUFFile
        The open file; its ``metadata`` also holds the tokenizer.
    config : ModelConfig
        The architecture.
    """

    def __init__(self, path: Path) -> None:
        self.file = GGUFFile(path)
        self._names = {hf_name(n): n for n in self.file.names() if n != _ROPE_FREQS}
        try:
            self.config = self._read_config()
        except (TypeError, ValueError, ZeroDivisionError, IndexError) as problem:
            raise CheckpointError(f"{path}: a value of the metadata makes no sense: {problem}") from None

    def names(self) -> list[str]:
        """Tensor names, as Hugging Face spells them."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, ``(out, in)`` for a matrix."""
        return self.file.shape(self._names[name])

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows ``start .. stop - 1`` of a tensor in Hugging Face's order of rows."""
        return self.file.read(self._names[name], self._rows(name, start, stop))

    def storage(self, name: str) -> str:
        """The storage that keeps a matrix; float16 for types that have none of their own."""
        return STORAGE_OF.get(self.file.kind(self._names[name]), "float16")

    def packed(self, name: str, start: int, stop: int) -> PackedRows:
        """Rows of a matrix whose storage has codes."""
        return self.file.packed(self._names[name], self._rows(name, start, stop))

    def _rows(self, name: str, start: int, stop: int) -> np.ndarray | slice:
        """Where the file has these rows."""
        heads = 0
        if ".q_proj." in name:
            heads = self.config.num_attention_heads
        elif ".k_proj." in name:
            heads = self.config.num_key_value_heads
        if heads and self.shape(name)[0] % (2 * heads) == 0:
            # llama.cpp rotates adjacent rows (i, i + 1), Hugging Face rows (i, i + D/2): undo its order.
            # A head count that does not fit is left to the check of shapes.
            dim = self.shape(name)[0] // heads
            order = np.arange(heads * dim).reshape(heads, dim // 2, 2).swapaxes(1, 2).reshape(-1)
            return order[start:stop]
        return slice(start, stop)

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    # ---- configuration -------------------------------------------------------------------------
    def _key(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self._arch}.{key}", default)

    def _read_config(self) -> ModelConfig:
        path, meta = self.file.path, self.file.metadata
        self._arch = meta.get("general.architecture")
        if self._arch not in ARCHITECTURES:
            raise ConfigError(
                f"{path}: unknown architecture {self._arch!r}: known are {', '.join(ARCHITECTURES)}"
            )
        if meta.get("split.count", 1) > 1:
            raise ConfigError(
                f"{path}: one of {meta['split.count']} parts of a model: "
                "merge them with llama-gguf-split --merge"
            )
        if self._key("expert_count"):
            raise ConfigError(f"{path}: mixtures of experts are not supported")
        embed = self._names.get("model.embed_tokens.weight")
        if embed is None:
            raise CheckpointError(f"{path}: tensor token_embd.weight is missing")
        heads, hidden = self._key("attention.head_count"), self._key("embedding_length")
        for name, value in (("attention.head_count", heads), ("embedding_length", hidden)):
            if not value:
                raise ConfigError(f"{path}: {self._arch}.{name} is missing")
        if isinstance(heads, list):
            raise ConfigError(f"{path}: head counts that differ by layer are not supported")
        head_dim = self._key("attention.key_length") or hidden // heads
        rotary = self._key("rope.dimension_count", head_dim)
        fields = {
            "model_type": self._arch,
            "vocab_size": self.file.shape(embed)[0],
            "hidden_size": hidden,
            "intermediate_size": self._key("feed_forward_length"),
            "num_hidden_layers": self._key("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._key("attention.head_count_kv", heads),
            "head_dim": head_dim,
            # Stored as float32: shorten 9.999999747378752e-06 to the number that was meant.
            "rms_norm_eps": _shortest(self._key("attention.layer_norm_rms_epsilon", 1e-5)),
            "rope_theta": _shortest(self._key("rope.freq_base", 10000.0)),
            "rope_scaling": self._rope_scaling(head_dim),
            "rotary_dim": rotary if rotary != head_dim else None,
            "max_position_embeddings": self._key("context_length", 2048),
            "tie_word_embeddings": "lm_head.weight" not in self._names,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._names,
            "attention_output_bias": "model.layers.0.self_attn.o_proj.bias" in self._names,
            "mlp_bias": "model.layers.0.mlp.down_proj.bias" in self._names,
        }
        missing = [key for key, value in fields.items() if value is None and key in _METADATA_OF]
        if missing:
            raise ConfigError(f"{path}: {self._arch}.{_METADATA_OF[missing[0]]} is missing")
        config: ModelConfig = parse_config(ModelConfig, fields, path)
        return config

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        path = self.file.path
        if _ROPE_FREQS in self.file.names():
            return self._llama3_scaling(head_dim)
        kind = self._key("rope.scaling.type", "none")
        factor = self._key("rope.scaling.factor", self._key("rope.scale_linear"))
        if kind in ("none", "linear") and factor in (None, 0, 1):
            return None
        if kind in ("none", "linear"):
            return {"rope_type": "linear", "factor": factor}
        original = self._key("rope.scaling.original_context_length")
        if kind == "yarn" and factor and original:
            return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        raise ConfigError(f"{path}: rope scaling of kind {kind!r} with factor {factor} is not supported")

    def _llama3_scaling(self, head_dim: int) -> dict[str, Any]:
        """Recover the parameters of llama3 scaling from the factors by which it divides frequencies."""
        count = self.file.shape(_ROPE_FREQS)[0]
        stored = self.file.read(_ROPE_FREQS, slice(None)).astype(np.float64)
        scaling = {
            "rope_type": "llama3",
            "factor": _shortest(float(stored.max())),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        theta = self._key("rope.freq_base", 10000.0)
        if count == head_dim // 2 and np.allclose(
            stored, _llama3_factors(scaling, theta, head_dim), rtol=1e-3
        ):
            return scaling
        raise ConfigError(
            f"{self.file.path}: {_ROPE_FREQS} holds factors that are not those of llama3 scaling"
        )


_METADATA_OF = {"intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count"}


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))


def _llama3_factors(scaling: dict[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """Factors of llama3 scaling for the ``head_dim // 2`` frequencies (Llama 3.1 model card)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (scaling["original_max_position_embeddings"] / wavelength - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)
