"""Which weights a model has: their names in the compiled library, shapes, and where they come from.

Names follow MLC-LLM: the Hugging Face name, with q, k, v fused into ``qkv_proj`` and gate, up into
``gate_up_proj`` (concatenated along the output axis, in that order). Experts of a layer are one matrix too,
expert after expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvq.config import ModelConfig
from kvq.errors import ConfigError

from .families import FAMILIES, Family


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
    rows : tuple of int
        Rows of each source; empty: all have the same number.
    offset : float
        Added to the values of the sources.
    of_experts : bool
        Whether it is a matrix of all experts.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    quantize: bool = False
    rows: tuple[int, ...] = ()
    offset: float = 0.0
    of_experts: bool = False

    def source_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """The tensors of the checkpoint that make it, with the shape each must have."""
        count = len(self.sources)
        rows = self.rows or (self.shape[0] // count,) * count
        return [(name, (n, *self.shape[1:])) for name, n in zip(self.sources, rows, strict=True)]


def model_parameters(config: ModelConfig) -> list[Parameter]:
    """Every weight of a model.

    Raises
    ------
    ConfigError
        If the family is unknown.
    """
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"model_type {config.model_type!r} cannot be compiled: known are {', '.join(FAMILIES)}"
        )
    return _Lister(config, FAMILIES[config.model_type]).all()


class _Lister:
    """Lists the weights layer by layer."""

    def __init__(self, config: ModelConfig, family: Family) -> None:
        self.config, self.family = config, family
        self.found: list[Parameter] = []

    def all(self) -> list[Parameter]:
        config, hidden = self.config, self.config.hidden_size
        self.matrix("model.embed_tokens", (config.vocab_size, hidden), ("model.embed_tokens",))
        for i, sparse in enumerate(config.sparse_layers):
            layer = f"model.layers.{i}"
            self.attention(layer)
            if sparse:
                self.experts(layer)
            else:
                self.feed_forward(layer)
            self.norms(layer)
        self.norm("model.norm", hidden)
        if not config.tie_word_embeddings:
            self.matrix("lm_head", (config.vocab_size, hidden), ("lm_head",))
        return self.found

    def matrix(
        self,
        name: str,
        shape: tuple[int, int],
        sources: tuple[str, ...],
        bias: bool = False,
        rows: tuple[int, ...] = (),
        quantize: bool = True,
        of_experts: bool = False,
    ) -> None:
        rows = rows if len(sources) > 1 else ()
        weights, biases = (tuple(f"{s}.{kind}" for s in sources) for kind in ("weight", "bias"))
        self.found.append(Parameter(f"{name}.weight", shape, weights, quantize, rows, of_experts=of_experts))
        if bias:
            self.found.append(Parameter(f"{name}.bias", shape[:1], biases, rows=rows))

    def norm(self, name: str, size: int, norm_type: str | None = None) -> None:
        weight, offset = f"{name}.weight", self.family.norm_offset
        self.found.append(Parameter(weight, (size,), (weight,), offset=offset))
        if (norm_type or self.config.norm_type) == "layer_norm":
            self.found.append(Parameter(f"{name}.bias", (size,), (f"{name}.bias",)))

    def attention(self, layer: str) -> None:
        config, names = self.config, self.family.names
        q = config.num_attention_heads * config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        attention = f"{layer}.self_attn"
        self.matrix(
            f"{attention}.qkv_proj",
            (q + 2 * kv, config.hidden_size),
            tuple(f"{layer}.{name}" for name in names.qkv),
            config.attention_bias,
            (q, kv, kv),
        )
        o_proj = f"{attention}.o_proj"
        self.matrix(o_proj, (config.hidden_size, q), (o_proj,), config.attention_output_bias)
        if config.qk_norm is not None:
            sizes = (q, kv) if config.qk_norm == "projection" else (config.head_dim,) * 2
            for name, size in zip(("q_norm", "k_norm"), sizes, strict=True):
                self.norm(f"{attention}.{name}", size, "rms_norm")

    def feed_forward(self, layer: str) -> None:
        config, inter = self.config, self.config.intermediate_size
        self.matrix(
            f"{layer}.mlp.gate_up_proj",
            (2 * inter, config.hidden_size),
            tuple(f"{layer}.{name}" for name in self.family.names.gate_up),
            config.mlp_bias,
        )
        down = f"{layer}.mlp.down_proj"
        self.matrix(down, (config.hidden_size, inter), (down,), config.mlp_bias)

    def experts(self, layer: str) -> None:
        config, names, hidden = self.config, self.family.names, self.config.hidden_size
        count, inter = config.num_experts or 0, config.moe_intermediate_size or 0
        experts = range(count)
        # the choice of experts is too small to gain from codes, and too important
        self.matrix(f"{layer}.mlp.gate", (count, hidden), (f"{layer}.{names.router}",), quantize=False)
        self.matrix(
            f"{layer}.mlp.experts.gate_up_proj",
            (count * 2 * inter, hidden),
            tuple(f"{layer}.{part.format(e)}" for e in experts for part in names.expert_gate_up),
            of_experts=True,
        )
        self.matrix(
            f"{layer}.mlp.experts.down_proj",
            (count * hidden, inter),
            tuple(f"{layer}.{names.expert_down.format(e)}" for e in experts),
            of_experts=True,
        )

    def norms(self, layer: str) -> None:
        for name in norm_names(self.config):
            self.norm(f"{layer}.{name}", self.config.hidden_size)


def norm_names(config: ModelConfig) -> tuple[str, ...]:
    """Names of a layer's norms, in the order in which they act.

    ``post_attention_layernorm`` follows attention where the placement says so; in Llama it has that name
    because it stands between attention and the feed-forward network, before which it acts.
    """
    return {
        "pre": ("input_layernorm", "post_attention_layernorm"),
        "post": ("post_attention_layernorm", "post_feedforward_layernorm"),
        "both": (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
    }[config.norm_placement]
