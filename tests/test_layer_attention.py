"""Layers that differ: what a configuration says of them, what the pass makes of it, and what it costs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tvm
from pydantic import ValidationError
from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import spec

from kvq.cli.main import main
from kvq.compiler.target import cpu_target
from kvq.config import ChatConfig, LayerAttention, ModelConfig
from kvq.errors import CompileError
from kvq.layout import KVLayout
from kvq.memory import kv_layout, plan_memory
from kvq.memory_budget import fit_cache
from kvq.model.kv_cache import KVCache, create_paged_kv_cache
from kvq.model.rope import rope_parameters
from kvq.passes.lower_kv_cache import LowerPagedKVCache
from kvq.presets import PRESETS
from kvq.quantization.scheme import KVQuantization, resolve
from kvq.runtime.cache_shape import unread_bytes
from kvq.schedules.attention_variant import AttentionVariant
from kvq.schedules.backend import Kernels
from kvq.schedules.cuda.backend import CudaKernels

SIZES = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
}
KINDS = ("sliding_attention", "sliding_attention", "full_attention", "full_attention")
MIXED = {"sliding_window": 70, "layer_types": KINDS, "rope_layers": (True, False, True, False)}


def config(**more: Any) -> ModelConfig:
    return ModelConfig(**SIZES, **more)


# ---- what a configuration says --------------------------------------------------------------------
def test_layers_of_a_configuration() -> None:
    full, sliding = LayerAttention(), LayerAttention(window=70)
    assert config().layer_attention == (full,) * 4 and config().cache_window is None
    assert config(sliding_window=70).layer_attention == (sliding,) * 4
    assert config(sliding_window=70).cache_window == 70
    mixed = config(**MIXED, rope_local_theta=5e3)
    assert [(layer.window, layer.rope) for layer in mixed.layer_attention] == [
        (70, "local"),
        (70, "none"),
        (None, "global"),
        (None, "none"),
    ]
    assert mixed.cache_window is None
    assert config().sm_scale == 64**-0.5 and config(query_pre_attn_scalar=256).sm_scale == 1 / 16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": KINDS}, "sliding_window is missing"),
        (
            {"sliding_window": 70, "layer_types": KINDS[1:]},
            "layer_types has 3 entries, but num_hidden_layers is 4",
        ),
        ({"rope_layers": (True,) * 5}, "rope_layers has 5 entries"),
        ({"sliding_window": 0}, "greater than 0"),
        ({"layer_types": ("linear_attention",) * 4}, "full_attention"),
        ({"attn_logit_softcapping": -1.0}, "greater than 0"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**fields)


def chat(model: ModelConfig, **more: Any) -> ChatConfig:
    sizes = {"vocab_size": 64, "active_vocab_size": 64, "context_window_size": 512, "prefill_chunk_size": 64}
    return ChatConfig(
        model_type="llama",
        quantization="q0f16",
        model=model,
        max_batch_size=1,
        conv_template="chatml",
        **sizes,
        **more,
    )


def test_a_window_of_the_chat_configuration() -> None:
    assert chat(config(**MIXED)).served_model == config(**MIXED)
    served = chat(config(layer_types=("full_attention",) * 4), sliding_window_size=128).served_model
    assert served.cache_window == 128
    assert chat(config(sliding_window=70), sliding_window_size=70).served_model.cache_window == 70
    for model, fields, message in (
        (config(sliding_window=70), {"sliding_window_size": 64}, "contradicts the model's own window of 70"),
        (config(**MIXED), {"sliding_window_size": 70}, "contradicts"),
        (config(), {"sliding_window_size": 0}, "positive, not 0"),
        (
            config(),
            {"sliding_window_size": 64, "attention_sink_size": 4},
            "attention_sink_size 4 is not supported",
        ),
    ):
        with pytest.raises(ValidationError, match=message):
            chat(model, **fields)


# ---- what the pass makes of it --------------------------------------------------------------------
class Layers(nn.Module):
    """Attention alone, of every layer, with sinks if the configuration has them."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self.sinks = nn.Parameter((4,), "float32") if model.attention_sinks else None

    def main(self, qkv: nn.Tensor, paged_kv_cache: KVCache):
        total = None
        for layer in range(4):
            out = paged_kv_cache.attention_with_fused_qkv(
                layer, qkv, 4, self.model.sm_scale, sinks=self.sinks
            )
            total = out if total is None else total + out
        return total, paged_kv_cache

    def create(self, batch, tokens, chunk, page, window):
        return create_paged_kv_cache(self.model, batch, tokens, chunk, page, window, "float32")


def lowered(model: ModelConfig, kernels: Kernels | None = None) -> tvm.IRModule:
    packed = {"param_mode": "packed", "effect_mode": "none"}
    functions = {
        "main": {
            "qkv": spec.Tensor(["n", 1, 8, 64], "float32"),
            "paged_kv_cache": spec.Object(KVCache),
            "$": packed,
        },
        "create": {
            **dict.fromkeys(("batch", "tokens", "chunk", "page", "window"), int),
            "$": {"param_mode": "none", "effect_mode": "none"},
        },
    }
    mod = Layers(model).export_tvm(spec=functions, allow_extern=True)[0]
    lower = LowerPagedKVCache(KVQuantization(), 64, "float16", kernels or cpu_target().kernels)
    return lower(mod)


def calls(mod: tvm.IRModule, name: str) -> list[list[Any]]:
    """Kernel and arguments of each call of ``main`` whose kernel has such a name."""
    found = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call) and len(expr.args) > 1 and isinstance(expr.args[0], tvm.ir.GlobalVar):
            kernel = expr.args[0].name_hint
            if kernel.startswith(name):
                found.append([kernel, *expr.args[1].fields])

    relax.analysis.post_order_visit(mod["main"], visit)
    return found


def test_layers_of_a_kind_share_kernels_and_tables() -> None:
    scaled = {"rope_type": "linear", "factor": 8.0}  # not of the local RoPE
    mod = lowered(config(**MIXED, rope_local_theta=5e3, attn_logit_softcapping=50.0, rope_scaling=scaled))
    attention = calls(mod, "paged_attention")
    window, full = "paged_attention_window_70_softcap_50", "paged_attention_softcap_50"
    assert [kernel for kernel, *_ in attention] == [window, window, full, full]
    appends = [kernel for kernel, *_ in calls(mod, "kv_append")]
    assert appends == ["kv_append_0_125", "kv_append_0_125_without_rope"] * 2
    local, none, scaled_too = (frequency.value.numpy() for _, _, frequency in calls(mod, "rope_table"))
    np.testing.assert_array_equal(local, rope_parameters(5e3, 64)[0])
    np.testing.assert_array_equal(scaled_too, rope_parameters(1e4, 64, scaled)[0])
    assert none.shape == (1,)  # a table is passed where nothing rotates, too
    read = [arguments[1] for _, *arguments in calls(mod, "kv_append")]
    assert len(set(read)) == 3 and read[1].same_as(read[3])


def test_sinks_reach_the_kernel() -> None:
    mod = lowered(config(attention_sinks=True))
    attention = calls(mod, "paged_attention")
    assert {kernel for kernel, *_ in attention} == {"paged_attention_sinks"}
    sinks = [call[9] for call in attention]
    assert all(tuple(map(int, value.ty.shape)) == (4,) for value in sinks)


def test_cuda_has_sinks_for_half_rows_alone() -> None:
    kernels = CudaKernels(("sm_90",))
    with pytest.raises(CompileError, match="attention with sinks over float32 rows"):
        kernels.paged_attention(
            KVLayout(1, 2, 64, None, None, row_dtype="float32", order="fragments"),
            4,
            "float32",
            AttentionVariant(sinks=True),
        )


# ---- what it costs --------------------------------------------------------------------------------
MISTRAL = PRESETS["mistral-7b"].model_copy(update={"sliding_window": 4096})


def test_a_model_whose_layers_all_slide_keeps_a_window_and_a_chunk() -> None:
    schemes = resolve("q4f16kv")
    full, sliding = (plan_memory(model, *schemes, 32768) for model in (PRESETS["mistral-7b"], MISTRAL))
    assert full.max_tokens == 32768 and sliding.max_tokens == 4096 + 2048 + 64
    layout = kv_layout(MISTRAL, *schemes)
    shape, _ = fit_cache(
        MISTRAL,
        layout,
        weights_bytes=0,
        context_window_size=32768,
        prefill_chunk_size=512,
        max_batch_size=1,
    )
    assert shape.num_pages == (4096 + 512) // 64 + 1
    assert unread_bytes(layout, [4096] * 32, 32768) == 0


def test_what_layers_with_a_window_do_not_read_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MISTRAL.model_copy(update={"layer_types": KINDS * 8})
    layout = kv_layout(model, *resolve("q4f16kv"))
    windows = [layer.window for layer in model.layer_attention]
    unread = (512 - 64) * 16 * layout.page_bytes // 32  # pages, layers, bytes of a layer's page
    assert unread_bytes(layout, windows, 32768) == unread
    assert unread_bytes(layout, windows, 4096) == 0
    monkeypatch.setitem(PRESETS, "mixed", model)
    words = ["plan", "mixed", "-q", "q4f16kv", "--context-window-size", "32768"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_unread_bytes"] == unread
    assert main(words) == 0
    assert "lie before the windows of the sliding layers, unread" in capsys.readouterr().out


def test_variants_have_names() -> None:
    assert (
        AttentionVariant().suffix == ""
        and AttentionVariant(70, 0.5, True).suffix == "_window_70_softcap_0_5_sinks"
    )
