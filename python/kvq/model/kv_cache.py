"""The cache as a model sees it: TVM's ``PagedKVCache`` and its generic creation call.

The creation call is the one MLC-LLM's models make, so that the KV rewrite reads their geometry and ours
from one form.
"""

from __future__ import annotations

import json

from tvm import relax, tirx
from tvm.ir import StringImm
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache, RopeMode
from tvm.script import relax as R

from kvq.config import ModelConfig

#: Name of the creation call, and of the argument list it takes.
CREATE_GENERIC = "mlc.create_paged_kv_cache_generic"


def create_paged_kv_cache(
    config: ModelConfig,
    max_batch_size: tirx.Var,
    max_total_seq_len: tirx.Var,
    prefill_chunk_size: tirx.Var,
    page_size: tirx.Var,
    support_sliding_window: tirx.Var,
    dtype: str,
) -> PagedKVCache:
    """Emit the creation call for a model with full multi-head attention."""
    rotary_dim = config.rotary_dim or config.head_dim
    return PagedKVCache(
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
            ty_args=relax.AnyType(),
        ),
        _name="paged_kv_cache",
    )
