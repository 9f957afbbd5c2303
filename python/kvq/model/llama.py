"""The Llama family on TVM's ``relax.frontend.nn``, attention through ``PagedKVCache``."""

from __future__ import annotations

from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op, spec
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache

from kvq.config import ModelConfig

from .kv_cache import create_paged_kv_cache

DTYPE = "float32"


class Attention(nn.Module):
    """Fused q, k, v projection, attention over the cache, output projection."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.total_heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self.qkv_proj = nn.Linear(
            config.hidden_size, self.total_heads * config.head_dim, config.attention_bias, DTYPE
        )
        self.o_proj = nn.Linear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            config.attention_output_bias,
            DTYPE,
        )

    def forward(self, x: nn.Tensor, kv: PagedKVCache, layer: int) -> nn.Tensor:
        config, n = self.config, x.shape[0]
        qkv = op.reshape(self.qkv_proj(x), (n, 1, self.total_heads, config.head_dim))
        out = kv.attention_with_fused_qkv(
            layer, qkv, config.num_attention_heads, sm_scale=config.head_dim**-0.5
        )
        return self.o_proj(op.reshape(out, (n, config.num_attention_heads * config.head_dim)))


class MLP(nn.Module):
    """Gated feed-forward network; gate and up projections are one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        self.gate_up_proj = nn.Linear(
            config.hidden_size, 2 * config.intermediate_size, config.mlp_bias, DTYPE
        )
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, config.mlp_bias, DTYPE)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        gate, up = op.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(op.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Attention and feed-forward network, each behind a norm and a residual."""

    def __init__(self, config: ModelConfig) -> None:
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        norm = {"bias": False, "dtype": DTYPE}
        self.input_layernorm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, **norm)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, **norm)

    def forward(self, x: nn.Tensor, kv: PagedKVCache, layer: int) -> nn.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), kv, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    """Embedding, decoder layers and the last norm."""

    def __init__(self, config: ModelConfig) -> None:
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, DTYPE)
        self.layers = nn.ModuleList([DecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False, dtype=DTYPE)

    def forward(self, input_ids: nn.Tensor, kv: PagedKVCache) -> nn.Tensor:
        x = self.embed_tokens(op.reshape(input_ids, (-1,)))
        for i, layer in enumerate(self.layers):
            x = layer(x, kv, i)
        return x


class LlamaForCausalLM(nn.Module):
    """The functions that a compiled library exports.

    ``prefill`` takes the rows of a ragged batch one after another, and the rows whose logits are wanted;
    ``decode`` takes one row a sequence. Which row belongs to which sequence is the cache's to know.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.model = LlamaModel(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, False, DTYPE)

    def _logits(self, x: nn.Tensor) -> nn.Tensor:
        x = self.model.norm(x)
        if self.config.tie_word_embeddings:
            return op.matmul(x, op.permute_dims(self.model.embed_tokens.weight))
        return self.lm_head(x)

    def prefill(
        self, input_ids: nn.Tensor, logit_positions: nn.Tensor, paged_kv_cache: PagedKVCache
    ) -> tuple[nn.Tensor, PagedKVCache]:
        """``input_ids`` int32 [1, n]; logits float32 [1, m, V] of the ``logit_positions`` int32 [m]."""
        x = self.model(input_ids, paged_kv_cache)
        x = op.wrap_nested(relax.op.take(x._expr, logit_positions._expr, axis=0, mode="clip"), "logit_rows")
        logits = self._logits(x)
        return op.reshape(logits, (1, *logits.shape)), paged_kv_cache

    def decode(self, input_ids: nn.Tensor, paged_kv_cache: PagedKVCache) -> tuple[nn.Tensor, PagedKVCache]:
        """``input_ids`` int32 [b, 1]; logits float32 [b, 1, V]."""
        logits = self._logits(self.model(input_ids, paged_kv_cache))
        return op.reshape(logits, (logits.shape[0], 1, logits.shape[1])), paged_kv_cache

    def create_paged_kv_cache(
        self,
        max_batch_size: tirx.Var,
        max_total_seq_len: tirx.Var,
        prefill_chunk_size: tirx.Var,
        page_size: tirx.Var,
        support_sliding_window: tirx.Var,
    ) -> PagedKVCache:
        """The generic creation call, which the KV rewrite replaces."""
        return create_paged_kv_cache(
            self.config,
            max_batch_size,
            max_total_seq_len,
            prefill_chunk_size,
            page_size,
            support_sliding_window,
            DTYPE,
        )

    def get_default_spec(self) -> spec.ModuleSpec:
        """Signatures of the exported functions."""
        packed = {"param_mode": "packed", "effect_mode": "none"}
        return spec.ModuleSpec.from_raw(
            {
                "prefill": {
                    "input_ids": spec.Tensor([1, "seq_len"], "int32"),
                    "logit_positions": spec.Tensor(["num_logits"], "int32"),
                    "paged_kv_cache": spec.Object(PagedKVCache),
                    "$": packed,
                },
                "decode": {
                    "input_ids": spec.Tensor(["batch_size", 1], "int32"),
                    "paged_kv_cache": spec.Object(PagedKVCache),
                    "$": packed,
                },
                "create_paged_kv_cache": {
                    "max_batch_size": int,
                    "max_total_seq_len": int,
                    "prefill_chunk_size": int,
                    "page_size": int,
                    "support_sliding_window": int,
                    "$": {"param_mode": "none", "effect_mode": "none"},
                },
            },
            self,
        )
