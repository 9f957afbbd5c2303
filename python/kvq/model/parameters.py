"""Which weights a model has: their names in the compiled library, shapes, and where they come from.

Names follow MLC-LLM: the Hugging Face name, with q, k, v fused into ``qkv_proj`` and gate, up into
``gate_up_proj`` (concatenated along the output axis, in that order).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvq.config import ModelConfig


@dataclass(frozen=True)
class Parameter:
    """One weight of a model.

    Attributes
    ----------
    name : str
        Name in the compiled library, e.g. ``model.layers.0.self_attn.qkv_proj.weight``.
    shape : tuple of int
        ``(out, in)`` for a matrix, ``(n,)`` for a vector.
    sources : tuple of str
        Hugging Face tensor names, concatenated along axis 0.
    quantize : bool
        Whether a weight scheme with codes applies to it (matrices, not norms and biases).
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    quantize: bool = False


def llama_parameters(config: ModelConfig) -> list[Parameter]:
    """Weights of the Llama family, in the order in which the compiled library takes them."""
    hidden, inter, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_out, kv_out = config.num_attention_heads * dim, config.num_key_value_heads * dim
    out = [
        Parameter(
            "model.embed_tokens.weight", (config.vocab_size, hidden), ("model.embed_tokens.weight",), True
        )
    ]

    def linear(prefix: str, fused: str, parts: tuple[str, ...], n: int, k: int, bias: bool) -> None:
        out.append(
            Parameter(f"{prefix}.{fused}.weight", (n, k), tuple(f"{prefix}.{p}.weight" for p in parts), True)
        )
        if bias:
            out.append(Parameter(f"{prefix}.{fused}.bias", (n,), tuple(f"{prefix}.{p}.bias" for p in parts)))

    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        attn, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        linear(
            attn,
            "qkv_proj",
            ("q_proj", "k_proj", "v_proj"),
            q_out + 2 * kv_out,
            hidden,
            config.attention_bias,
        )
        linear(attn, "o_proj", ("o_proj",), hidden, q_out, config.attention_output_bias)
        linear(mlp, "gate_up_proj", ("gate_proj", "up_proj"), 2 * inter, hidden, config.mlp_bias)
        linear(mlp, "down_proj", ("down_proj",), hidden, inter, config.mlp_bias)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out.append(Parameter(f"{layer}.{norm}.weight", (hidden,), (f"{layer}.{norm}.weight",)))
    out.append(Parameter("model.norm.weight", (hidden,), ("model.norm.weight",)))
    if not config.tie_word_embeddings:
        out.append(Parameter("lm_head.weight", (config.vocab_size, hidden), ("lm_head.weight",), True))
    return out
