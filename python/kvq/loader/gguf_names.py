"""Architectures of GGUF files: the family each belongs to, and Hugging Face's names for its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvq.model.families import FAMILIES, TensorNames

_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: Norms after attention and after the feed-forward network.
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)$")


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF.

    Attributes
    ----------
    family : str
        ``model_type`` of the family that it is.
    permuted : bool
        Whether llama.cpp's converter reorders the rows of q and k.
    layer : dict
        Names of a layer's tensors that differ from Llama's.
    """

    family: str
    permuted: bool = False
    layer: dict[str, str] = field(default_factory=dict)


_GEMMA2 = {**_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"}

#: Architectures by ``general.architecture``.
ARCHITECTURES = {
    "llama": Architecture("llama", permuted=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe"),
    "gemma": Architecture("gemma"),
    "gemma2": Architecture("gemma2", layer=_GEMMA2),
    "gemma3": Architecture("gemma3_text", layer=_GEMMA2),
    "phi3": Architecture("phi3", layer={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "smollm3": Architecture("smollm3", permuted=True),
    "olmo2": Architecture("olmo2", layer=_NORMS_AFTER),
    "stablelm": Architecture("stablelm"),
}
#: Llama with experts is Mixtral.
MIXTRAL = Architecture("mixtral", permuted=True)


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the file.

    Attributes
    ----------
    tensor : str
        Name in the file.
    shape : tuple of int
        Of the tensor that Hugging Face has.
    first_row : int
        Its first row, where the file has the experts of a layer in one tensor.
    """

    tensor: str
    shape: tuple[int, ...]
    first_row: int = 0


def places(architecture: Architecture, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Place]]:
    """Hugging Face's names for what a tensor of the file holds; its own name where they have none.

    Parameters
    ----------
    name : str
        Name in the file.
    shape : tuple of int
        Outermost axis first.
    """
    match = _NAME.match(name)
    layer, stem, kind = match.groups() if match else (None, "", "")
    if layer is None:
        yield f"{_GLOBAL[stem]}.{kind}" if stem in _GLOBAL else name, Place(name, shape)
        return
    prefix = f"model.layers.{layer}"
    names = FAMILIES[architecture.family].names
    expert = _expert(names, stem)
    if expert is not None and len(shape) == 3:
        for e in range(shape[0]):
            yield f"{prefix}.{expert.format(e)}.{kind}", Place(name, shape[1:], e * shape[1])
        return
    known = {**_LAYER, "ffn_gate_inp": names.router, **architecture.layer}
    yield f"{prefix}.{known[stem]}.{kind}" if stem in known else name, Place(name, shape)


def _expert(names: TensorNames, stem: str) -> str | None:
    """Name of an expert's tensor, of which ``stem`` holds all."""
    gate, up = names.expert_gate_up
    return {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": names.expert_down}.get(stem)


def unpermuted_rows(heads: int, head_dim: int) -> np.ndarray:
    """Rows of the file in Hugging Face's order.

    llama.cpp rotates adjacent rows (i, i + 1) of a head, Hugging Face rows (i, i + D/2).
    """
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
