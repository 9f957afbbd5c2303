"""The cache as a model sees it: TVM's ``PagedKVCache`` and its generic creation call.

The creation call is the one MLC-LLM's models make, so that the KV rewrite reads their geometry and ours
from one form. What it cannot say stands in further arguments: of the creation call, what the configuration
knows (:func:`attention_attributes`); of the attention call, what is a weight (:class:`KVCache`).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from tvm import relax, tirx
from tvm.ir import StringImm
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache, RopeMode
from tvm.script import relax as R

from kvq.config import LayerAttention, ModelConfig

#: Name of the creation call, and of the argument list it takes.
CREATE_GENERIC = "mlc.create_paged_kv_cache_generic"
#: Name of the attention call.
ATTENTION = "vm.builtin.attention_kv_cache_attention_with_fused_qkv"


class KVCache(PagedKVCache):
    """The cache class of kvq's models: TVM's, with attention sinks."""

    def attention_with_fused_qkv(
        self,
        layer_id: int,
        qkv: nn.Tensor,
        num_qo_heads: int,
        sm_scale: float,
        sinks: nn.Tensor | None = None,
    ) -> nn.Tensor:
        """Attention of one layer; RoPE, window and soft-capping are the creation call's to say.

        Parameters
        ----------
        layer_id : int
            Number of the layer.
        qkv : nn.Tensor
            ``[b, s, Hq + 2 H, D]``: queries, keys and values of the step's rows.
        num_qo_heads : int
            ``Hq``.
        sm_scale : float
            What scores are multiplied by: ``ModelConfig.sm_scale``.
        sinks : nn.Tensor, optional
            float32 ``[Hq]``: a logit a head that takes part in the softmax without a value.

        Returns
        -------
        out : nn.Tensor
            ``[b, s, Hq, D]``.
        """
        if sinks is None:
            return super().attention_with_fused_qkv(layer_id, qkv, num_qo_heads, sm_scale)
        b, s, heads, dim = qkv.shape
        rows = op.reshape(qkv, (b * s, heads, dim))
        call = relax.call_dps_packed(
            ATTENTION,
            [self._expr, relax.prim_value(layer_id), relax.prim_value(sm_scale), rows._expr, sinks._expr],
            out_ty=relax.TensorType((b * s, num_qo_heads, dim), qkv.dtype),
        )
        return op.reshape(op.wrap_nested(call, "attention"), (b, s, num_qo_heads, dim))


def attention_attributes(config: ModelConfig) -> dict[str, Any]:
    """What the creation call says of attention beyond TVM's arguments; empty where they say it all.

    Returns
    -------
    attributes : dict
        ``layers``: the fields of :class:`~kvq.config.LayerAttention` for each layer; ``rope_local_theta`` and
        ``attn_logit_softcapping`` as in the configuration. What is as in any Llama is left out.
    """
    attributes = {
        "rope_local_theta": config.rope_local_theta,
        "attn_logit_softcapping": config.attn_logit_softcapping,
    }
    given: dict[str, Any] = {key: value for key, value in attributes.items() if value is not None}
    if any(layer != LayerAttention() for layer in config.layer_attention):
        given["layers"] = [asdict(layer) for layer in config.layer_attention]
    return given


def create_paged_kv_cache(
    config: ModelConfig,
    max_batch_size: tirx.Var,
    max_total_seq_len: tirx.Var,
    prefill_chunk_size: tirx.Var,
    page_size: tirx.Var,
    support_sliding_window: tirx.Var,
    dtype: str,
) -> KVCache:
    """Emit the creation call of a model with multi-head attention."""
    rotary_dim = config.rotary_dim or config.head_dim
    attributes = attention_attributes(config)
    return KVCache(
        _expr=relax.call_pure_packed(
            CREATE_GENERIC,
            StringImm("mha"),
            relax.ShapeExpr(
                [max_batch_size, max_total_seq_len, prefill_chunk_size, page_size, support_sliding_window]
            ),
            relax.ShapeExpr([0, config.num_hidden_layers]),
            relax.prim_value(config.num_hidden_layers),
            relax.prim_value(config.num_attention_heads),
            relax.prim_value(config.num_key_value_heads),
            relax.prim_value(config.head_dim),
            relax.prim_value(config.head_dim),
            relax.prim_value(0),
            relax.prim_value(0),
            relax.prim_value(int(RopeMode.NORMAL)),
            relax.prim_value(1),
            relax.prim_value(float(config.rope_theta)),
            StringImm(json.dumps(config.rope_scaling or {})),
            relax.prim_value(0),
            relax.prim_value(rotary_dim),
            relax.prim_value(0),
            R.dtype(dtype),
            *([StringImm(json.dumps(attributes))] if attributes else []),
            ty_args=relax.AnyType(),
        ),
        _name="paged_kv_cache",
    )
