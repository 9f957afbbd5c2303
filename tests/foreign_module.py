"""A module of another project's making: TVM's cache class, and MLC-LLM's creation call written out."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import StringImm
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import spec
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache
from tvm.script import relax as R

LAYERS, HEADS, KV_HEADS, DIM, ROTARY, THETA = 2, 4, 2, 64, 32, 500.0


class ForeignModel(nn.Module):
    """Attention alone: the inputs are q, k and v of both layers, the output is the sum of the layers."""

    def batch_decode(self, qkv: nn.Tensor, paged_kv_cache: PagedKVCache):
        first = paged_kv_cache.attention_with_fused_qkv(0, qkv, HEADS, sm_scale=0.125)
        second = paged_kv_cache.attention_with_fused_qkv(1, qkv, HEADS, sm_scale=0.125)
        positions = paged_kv_cache.get_query_positions(qkv.shape[0] * qkv.shape[1])
        return first + second, positions, paged_kv_cache

    def create_paged_kv_cache(
        self,
        max_batch_size: tirx.Var,
        max_total_seq_len: tirx.Var,
        prefill_chunk_size: tirx.Var,
        page_size: tirx.Var,
        support_sliding_window: tirx.Var,
    ):
        limits = [max_batch_size, max_total_seq_len, prefill_chunk_size, page_size, support_sliding_window]
        return PagedKVCache(
            _expr=relax.call_pure_packed(
                "mlc.create_paged_kv_cache_generic",
                relax.Tuple([StringImm("mha")] * LAYERS),
                relax.ShapeExpr(limits),
                relax.ShapeExpr([0, LAYERS]),
                *(relax.prim_value(x) for x in (LAYERS, HEADS, KV_HEADS, DIM, DIM, 0, 0, 1, 1, THETA)),
                StringImm('{"rope_type": "linear", "factor": 2.0}'),
                relax.const(np.ones(4, np.float32)),
                relax.prim_value(ROTARY),
                relax.prim_value(0),
                R.dtype("float16"),
                ty_args=relax.AnyType(),
            ),
            _name="paged_kv_cache",
        )


def foreign_module() -> tvm.IRModule:
    """The exported module: ``batch_decode`` (float16) and ``create_paged_kv_cache``."""
    functions = {
        "batch_decode": {
            "qkv": spec.Tensor(["batch_size", 1, HEADS + 2 * KV_HEADS, DIM], "float16"),
            "paged_kv_cache": spec.Object(PagedKVCache),
            "$": {"param_mode": "packed", "effect_mode": "none"},
        },
        "create_paged_kv_cache": {
            **dict.fromkeys(
                (
                    "max_batch_size",
                    "max_total_seq_len",
                    "prefill_chunk_size",
                    "page_size",
                    "support_sliding_window",
                ),
                int,
            ),
            "$": {"param_mode": "none", "effect_mode": "none"},
        },
    }
    return ForeignModel().export_tvm(spec=functions, allow_extern=True)[0]
