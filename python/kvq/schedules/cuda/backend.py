"""The CUDA backend: kernels in TIRx; weights stay as they are stored."""

from __future__ import annotations

from tvm import tirx

from kvq.layout import KVLayout
from kvq.schedules.backend import AttentionShape, Preparation

from . import kv_append, kv_seal, linear, pointwise, tile_attention


class CudaKernels:
    """Kernels for NVIDIA GPUs from sm_80 on."""

    int8 = None
    layout_order = "fragments"

    def attention_shape(self, layout: KVLayout, num_heads: int) -> AttentionShape:
        return tile_attention.attention_shape(layout, num_heads)

    def prepare_vector(self, n: int, dtype: str) -> Preparation | None:
        if dtype == "float32":
            return None
        name = f"prepare_vector_{n}"
        return Preparation(name, lambda: linear.prepare_vector(n, dtype), (n,), "float32")

    def prepare_codes(self, n: int, k: int) -> None:
        return None

    def prepare_matrix(self, n: int, columns: int, dtype: str) -> None:
        return None

    def rope_table(self, half: int, attention_factor: float) -> tirx.PrimFunc:
        return kv_append.rope_table(half, attention_factor)

    def kv_append(
        self, layout: KVLayout, num_heads: int, rotary_dim: int, sm_scale: float, dtype: str
    ) -> tirx.PrimFunc:
        return kv_append.kv_append(layout, num_heads, rotary_dim, sm_scale, dtype)

    def kv_seal(self, layout: KVLayout, num_heads: int) -> tirx.PrimFunc:
        return kv_seal.kv_seal(layout, num_heads)

    def paged_attention(self, layout: KVLayout, num_heads: int, dtype: str) -> tirx.PrimFunc:
        return tile_attention.tile_attention(layout, num_heads, dtype)

    def kv_carry(self, layout: KVLayout) -> tirx.PrimFunc:
        return kv_seal.kv_carry(layout)

    def linear(self, n: int, k: int, kind: str) -> tirx.PrimFunc:
        return linear.linear(n, k, kind)

    def embedding(self, n: int, k: int, kind: str) -> tirx.PrimFunc:
        return linear.embedding(n, k, kind)

    def rms_norm(self, dim: int, eps: float) -> tirx.PrimFunc:
        return pointwise.rms_norm(dim, eps)

    def silu_gate(self, dim: int) -> tirx.PrimFunc:
        return pointwise.silu_gate(dim)
