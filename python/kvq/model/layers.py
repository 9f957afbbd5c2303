"""The layers that all families share, on TVM's ``relax.frontend.nn``."""

from __future__ import annotations

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from kvq.config import ModelConfig

from .kv_cache import KVCache
from .parameters import norm_names

DTYPE = "float32"


def make_norm(config: ModelConfig, size: int, norm_type: str | None = None) -> nn.Module:
    """A norm of ``size`` channels, of the model's type if none is given."""
    if (norm_type or config.norm_type) == "layer_norm":
        return nn.LayerNorm(size, config.rms_norm_eps, dtype=DTYPE)
    return nn.RMSNorm(size, -1, config.rms_norm_eps, bias=False, dtype=DTYPE)


class Attention(nn.Module):
    """Fused q, k, v projection, norms of q and k if the model has them, the cache, output projection."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.q_out = config.num_attention_heads * config.head_dim
        self.kv_out = config.num_key_value_heads * config.head_dim
        self.qkv_proj = nn.Linear(
            config.hidden_size, self.q_out + 2 * self.kv_out, config.attention_bias, DTYPE
        )
        self.o_proj = nn.Linear(self.q_out, config.hidden_size, config.attention_output_bias, DTYPE)
        if config.qk_norm is not None:
            per_head = config.qk_norm == "head"
            self.q_norm = make_norm(config, config.head_dim if per_head else self.q_out, "rms_norm")
            self.k_norm = make_norm(config, config.head_dim if per_head else self.kv_out, "rms_norm")

    def forward(self, x: nn.Tensor, kv: KVCache, layer: int) -> nn.Tensor:
        config, n = self.config, x.shape[0]
        qkv = self.qkv_proj(x)
        if config.qk_norm is not None:
            qkv = self._normalize(qkv, n)
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        out = kv.attention_with_fused_qkv(
            layer,
            op.reshape(qkv, (n, 1, heads, config.head_dim)),
            config.num_attention_heads,
            sm_scale=config.sm_scale,
        )
        return self.o_proj(op.reshape(out, (n, self.q_out)))

    def _normalize(self, qkv: nn.Tensor, n: int) -> nn.Tensor:
        """Norm of queries and keys, by head or whole."""
        q, k, v = op.split(qkv, [self.q_out, self.q_out + self.kv_out], axis=-1)
        size, dim = self.config.qk_norm, self.config.head_dim

        def normalize(norm: nn.Module, part: nn.Tensor, width: int) -> nn.Tensor:
            if size == "projection":
                return norm(part)
            return op.reshape(norm(op.reshape(part, (n * (width // dim), dim))), (n, width))

        return op.concat(
            [normalize(self.q_norm, q, self.q_out), normalize(self.k_norm, k, self.kv_out), v], 1
        )


def activate(x: nn.Tensor, kind: str) -> nn.Tensor:
    """The activation ``ModelConfig.hidden_act``."""
    return op.silu(x) if kind == "silu" else op.gelu(x, approximate="tanh")


class MLP(nn.Module):
    """Gated feed-forward network; gate and up projections are one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        self.hidden_act = config.hidden_act
        self.gate_up_proj = nn.Linear(
            config.hidden_size, 2 * config.intermediate_size, config.mlp_bias, DTYPE
        )
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, config.mlp_bias, DTYPE)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        gate, up = op.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(activate(gate, self.hidden_act) * up)


class DecoderLayer(nn.Module):
    """Attention and feed-forward network with their norms, each beside a residual."""

    def __init__(self, config: ModelConfig, mlp: nn.Module) -> None:
        self.placement = config.norm_placement
        self.self_attn = Attention(config)
        self.mlp = mlp
        self.norm_names = norm_names(config)
        for name in self.norm_names:
            setattr(self, name, make_norm(config, config.hidden_size))

    def forward(self, x: nn.Tensor, kv: KVCache, layer: int) -> nn.Tensor:
        norms = [getattr(self, name) for name in self.norm_names]
        before, after = {"pre": (norms, None), "post": (None, norms)}.get(
            self.placement, (norms[::2], norms[1::2])
        )
        h = self.self_attn(before[0](x) if before else x, kv, layer)
        x = x + (after[0](h) if after else h)
        h = self.mlp(before[1](x) if before else x)
        return x + (after[1](h) if after else h)
