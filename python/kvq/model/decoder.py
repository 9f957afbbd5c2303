"""A decoder-only transformer, and the functions that a compiled library exports."""

from __future__ import annotations

from tvm import relax, tirx
from tvm.ir import IRModule
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op, spec

from kvq.config import ModelConfig

from .experts import SparseMLP
from .kv_cache import KVCache, create_paged_kv_cache
from .layers import DTYPE, MLP, DecoderLayer, make_norm


class DecoderModel(nn.Module):
    """Embedding, decoder layers and the last norm."""

    def __init__(self, config: ModelConfig) -> None:
        self.embedding_scale = config.embedding_scale
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, DTYPE)
        self.layers = nn.ModuleList(
            [
                DecoderLayer(config, SparseMLP(config) if sparse else MLP(config))
                for sparse in config.sparse_layers
            ]
        )
        self.norm = make_norm(config, config.hidden_size)

    def forward(self, input_ids: nn.Tensor, kv: KVCache) -> nn.Tensor:
        x = self.embed_tokens(op.reshape(input_ids, (-1,)))
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        for i, layer in enumerate(self.layers):
            x = layer(x, kv, i)
        return x


class CausalLM(nn.Module):
    """The functions that a compiled library exports.

    ``prefill`` takes the rows of a ragged batch one after another, and the rows whose logits are wanted;
    ``decode`` takes one row a sequence. Which row belongs to which sequence is the cache's to know.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.model = DecoderModel(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, False, DTYPE)

    def _logits(self, x: nn.Tensor) -> nn.Tensor:
        x = self.model.norm(x)
        if self.config.tie_word_embeddings:
            logits = op.matmul(x, op.permute_dims(self.model.embed_tokens.weight))
        else:
            logits = self.lm_head(x)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else op.tanh(logits / cap) * cap

    def prefill(
        self, input_ids: nn.Tensor, logit_positions: nn.Tensor, paged_kv_cache: KVCache
    ) -> tuple[nn.Tensor, KVCache]:
        """``input_ids`` int32 [1, n]; logits float32 [1, m, V] of the ``logit_positions`` int32 [m]."""
        x = self.model(input_ids, paged_kv_cache)
        x = op.wrap_nested(relax.op.take(x._expr, logit_positions._expr, axis=0, mode="clip"), "logit_rows")
        logits = self._logits(x)
        return op.reshape(logits, (1, *logits.shape)), paged_kv_cache

    def decode(self, input_ids: nn.Tensor, paged_kv_cache: KVCache) -> tuple[nn.Tensor, KVCache]:
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
    ) -> KVCache:
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
                    "paged_kv_cache": spec.Object(KVCache),
                    "$": packed,
                },
                "decode": {
                    "input_ids": spec.Tensor(["batch_size", 1], "int32"),
                    "paged_kv_cache": spec.Object(KVCache),
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


def export_model(config: ModelConfig) -> tuple[IRModule, list[str]]:
    """Build the Relax module of a model, on the opaque cache and float32 weights.

    Returns
    -------
    mod : IRModule
        Functions ``prefill``, ``decode`` and ``create_paged_kv_cache``.
    names : list of str
        Parameter names in the order of the packed tuple.
    """
    model = CausalLM(config)
    mod, params, _ = model.export_tvm(spec=model.get_default_spec(), allow_extern=True)
    return mod, [name for name, _ in params]
