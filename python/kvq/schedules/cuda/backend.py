"""The CUDA backend: kernels in TIRx; weights stay as they are stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx

from kvq.errors import CompileError
from kvq.layout import KVLayout
from kvq.schedules.attention_variant import PLAIN, AttentionVariant
from kvq.schedules.backend import AttentionShape, DecodeShape, Preparation

from . import (
    kv_append,
    kv_carry,
    kv_seal,
    linear,
    paged_attention,
    pointwise,
    prefill_attention,
    tile_attention,
)

#: Partial results of rows that several blocks share in decode: more than any plan for one GPU makes.
DECODE_SLOTS = 1024


@dataclass(frozen=True)
class CudaKernels:
    """Kernels for NVIDIA GPUs.

    Attributes
    ----------
    archs : tuple of str
        Architectures that the library will hold, from ``sm_80`` on; they decide the tuning.
    """

    archs: tuple[str, ...]

    int8 = None
    layout_order = "fragments"

    def attention_shape(self, layout: KVLayout, num_heads: int) -> AttentionShape:
        if layout.row_dtype != "float16":  # tensor cores would round
            return tile_attention.attention_shape(layout, num_heads)
        shape = prefill_attention.attention_shape(layout, num_heads)
        tuning = paged_attention.decode_tuning(layout, num_heads, self.archs)
        decode = DecodeShape(paged_attention.TASK_FIELDS, tuning.blocks_per_sm, tuning.warps)
        return replace(shape, scratch_slots=DECODE_SLOTS, decode=decode)

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

    def paged_attention(
        self, layout: KVLayout, num_heads: int, dtype: str, variant: AttentionVariant = PLAIN
    ) -> tirx.PrimFunc:
        if variant != PLAIN:
            raise CompileError(
                f"cuda has no attention with {variant.describe()} yet: compile this model for the cpu"
            )
        if layout.row_dtype != "float16":
            return tile_attention.tile_attention(layout, num_heads, dtype)
        return prefill_attention.prefill_attention(layout, num_heads, dtype)

    def paged_attention_decode(self, layout: KVLayout, num_heads: int, dtype: str) -> tirx.PrimFunc:
        tuning = paged_attention.decode_tuning(layout, num_heads, self.archs)
        return paged_attention.paged_attention_decode(layout, num_heads, dtype, tuning)

    def kv_carry(self, layout: KVLayout) -> tirx.PrimFunc:
        return kv_carry.kv_carry(layout)

    def linear(self, n: int, k: int, kind: str) -> tirx.PrimFunc:
        return linear.linear(n, k, kind)

    def embedding(self, n: int, k: int, kind: str) -> tirx.PrimFunc:
        return linear.embedding(n, k, kind)

    def route_experts(self, num_experts: int, top_k: int, normalize: bool) -> tirx.PrimFunc:
        raise CompileError("mixtures of experts cannot be compiled for CUDA yet: use --device cpu")

    def expert_linear(
        self, n: int, k: int, num_experts: int, top_k: int, shared: bool, storage: str
    ) -> tirx.PrimFunc:
        raise CompileError("mixtures of experts cannot be compiled for CUDA yet: use --device cpu")

    def rms_norm(self, dim: int, eps: float) -> tirx.PrimFunc:
        return pointwise.rms_norm(dim, eps)

    def silu_gate(self, dim: int) -> tirx.PrimFunc:
        return pointwise.silu_gate(dim)
