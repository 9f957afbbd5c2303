"""The CPU backend: kernels for LLVM, weights in blocks of 16 output rows."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from kvq.layout import KVLayout
from kvq.quantization.storage import STORAGES
from kvq.runtime.cache_shape import SCRATCH_SLOTS
from kvq.schedules.attention_variant import PLAIN, AttentionVariant
from kvq.schedules.backend import ROUNDED, AttentionShape, Preparation, RowSource
from kvq.schedules.cache_arguments import SCRATCH_EXTRA

from . import (
    activations,
    embedding,
    experts,
    kv_append,
    kv_carry,
    kv_seal,
    linear,
    linear_q8,
    paged_attention,
    pointwise,
    weight_blocks,
)
from .vector import CpuIsa


@dataclass(frozen=True)
class CpuInt8Kernels:
    """Products with int8 activations."""

    isa: CpuIsa

    name, activations = "q8", "int8"

    def takes(self, k: int, storage: str) -> bool:
        return STORAGES[storage].bits is not None

    def row_type(self, k: int) -> tuple[int, str]:
        return activations.quantized_width(k), "int32"

    def row_order(self, most_rows: int | None) -> str:
        return ""

    def quantize_rows(self, k: int, order: str = "") -> tirx.PrimFunc:
        return activations.quantize_rows(k, self.isa)

    def linear(
        self,
        n: int,
        k: int,
        storage: str,
        residual: bool = False,
        most_rows: int | None = None,
        rows: RowSource = ROUNDED,
    ) -> tirx.PrimFunc | None:
        return linear_q8.linear_q8(n, k, storage, self.isa, residual=residual) if rows == ROUNDED else None

    def gated_linear(
        self,
        n: int,
        k: int,
        storage: str,
        activation: str,
        order: str,
        most_rows: int | None = None,
        rows: RowSource = ROUNDED,
    ) -> tirx.PrimFunc | None:
        return None

    def rms_norm(self, dim: int, eps: float, order: str = "") -> tirx.PrimFunc:
        return pointwise.rms_norm(dim, eps, self.isa, quantize=True)

    def gate(self, dim: int, activation: str, order: str = "") -> tirx.PrimFunc:
        return pointwise.gate(dim, activation, self.isa, quantize=True)


@dataclass(frozen=True)
class CpuKernels:
    """Kernels for a CPU with the instructions ``isa``."""

    isa: CpuIsa

    layout_order = "lanes"
    prepares_experts = True
    token_function = None
    row_limits = ()

    @property
    def rounded(self) -> CpuInt8Kernels:
        return CpuInt8Kernels(self.isa)

    def attention_shape(self, layout: KVLayout, num_heads: int) -> AttentionShape:
        return AttentionShape(
            paged_attention.SPLIT_PAGES,
            paged_attention.TILE_ROWS,
            SCRATCH_SLOTS,
            SCRATCH_EXTRA,
        )

    def prepare_vector(self, n: int, dtype: str) -> Preparation:
        name = f"prepare_vector_{n}"
        return Preparation(name, lambda: weight_blocks.prepare_vector(n, dtype), (n,), "float32")

    def prepare_codes(self, n: int, k: int, storage: str) -> Preparation:
        shape = (weight_blocks.num_blocks(n), k // weight_blocks.GROUP, 4, weight_blocks.BLOCK)
        name = f"prepare_codes_{n}x{k}"
        return Preparation(name, lambda: weight_blocks.prepare_int4_codes(n, k), shape, "uint32")

    def prepare_matrix(self, n: int, columns: int, dtype: str, storage: str) -> Preparation:
        shape = (weight_blocks.num_blocks(n), columns, weight_blocks.BLOCK)
        name = f"prepare_blocks_{n}x{columns}_{dtype}"
        return Preparation(name, lambda: weight_blocks.prepare_blocks(n, columns, dtype), shape, dtype)

    def rope_table(self, half: int, attention_factor: float) -> tirx.PrimFunc:
        return kv_append.rope_table(half, attention_factor)

    def kv_append(
        self, layout: KVLayout, num_heads: int, rotary_dim: int, sm_scale: float, dtype: str
    ) -> tirx.PrimFunc:
        return kv_append.kv_append(layout, num_heads, rotary_dim, sm_scale, dtype, self.isa)

    def kv_seal(self, layout: KVLayout, num_heads: int) -> tirx.PrimFunc:
        return kv_seal.kv_seal(layout, num_heads, self.isa)

    def paged_attention(
        self, layout: KVLayout, num_heads: int, dtype: str, variant: AttentionVariant = PLAIN
    ) -> tirx.PrimFunc:
        return paged_attention.paged_attention(layout, num_heads, dtype, self.isa, variant)

    def paged_attention_decode(
        self, layout: KVLayout, num_heads: int, dtype: str, variant: AttentionVariant = PLAIN
    ) -> tirx.PrimFunc:
        return self.paged_attention(layout, num_heads, dtype, variant)

    def kv_carry(self, layout: KVLayout) -> tirx.PrimFunc:
        return kv_carry.kv_carry(layout, self.isa)

    def linear(self, n: int, k: int, storage: str) -> tirx.PrimFunc:
        return linear.linear(n, k, storage, self.isa)

    def embedding(self, n: int, k: int, storage: str) -> tirx.PrimFunc:
        return embedding.embedding(n, k, storage)

    def route_experts(self, num_experts: int, top_k: int, normalize: bool) -> tirx.PrimFunc:
        return experts.route_experts(num_experts, top_k, normalize)

    def expert_linear(
        self, n: int, k: int, num_experts: int, top_k: int, shared: bool, storage: str
    ) -> tirx.PrimFunc:
        return experts.expert_linear(n, k, num_experts, top_k, shared, storage, self.isa)

    def find_tokens(self, vocab: int, drawable: int) -> tirx.PrimFunc:
        raise NotImplementedError("the host looks at logits itself")

    def rms_norm(self, dim: int, eps: float) -> tirx.PrimFunc:
        return pointwise.rms_norm(dim, eps, self.isa)

    def gate(self, dim: int, activation: str) -> tirx.PrimFunc:
        return pointwise.gate(dim, activation, self.isa)
