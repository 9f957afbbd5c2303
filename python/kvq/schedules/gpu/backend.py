"""The portable GPU backend: one set of kernels for Metal, Vulkan, OpenCL and WebGPU; weights as stored."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from kvq.errors import CompileError
from kvq.layout import KVLayout
from kvq.quantization.storage import STORAGES
from kvq.runtime.metadata import LIKELIEST
from kvq.schedules.attention_variant import PLAIN, AttentionVariant
from kvq.schedules.backend import AttentionShape, Preparation

from . import (
    embedding,
    experts,
    kv_append,
    kv_carry,
    kv_seal,
    likeliest,
    linear,
    paged_attention,
    pointwise,
    rope_table,
)
from .decode_attention import decode_attention
from .decode_tile import decode_tile
from .limits import GpuLimits


@dataclass(frozen=True)
class GpuKernels:
    """Kernels for any GPU with these limits.

    Attributes
    ----------
    device : str
        What messages call the target.
    limits : GpuLimits
        What the kernels keep to.
    """

    device: str
    limits: GpuLimits

    rounded = None
    row_limits = ()
    layout_order = "lanes"
    prepares_experts = False
    token_function = LIKELIEST

    def _needs_float16(self, what: str) -> None:
        if not self.limits.float16:
            raise CompileError(
                f"{self.device} is compiled for GPUs without fp16, which {what} needs: use q0f32"
            )

    def attention_shape(self, layout: KVLayout, num_heads: int) -> AttentionShape:
        if layout.row_dtype == "float16":
            self._needs_float16("a cache of fp16 rows")
        return paged_attention.attention_shape(layout, num_heads, self.limits)

    def prepare_vector(self, n: int, dtype: str) -> Preparation | None:
        if dtype == "float32":
            return None
        self._needs_float16("a weight in fp16")
        return Preparation(
            f"prepare_vector_{n}", lambda: linear.prepare_vector(n, dtype, self.limits), (n,), "float32"
        )

    def prepare_codes(self, n: int, k: int, storage: str) -> None:
        return None

    def prepare_matrix(self, n: int, columns: int, dtype: str, storage: str) -> None:
        return None

    def rope_table(self, half: int, attention_factor: float) -> tirx.PrimFunc:
        return rope_table.rope_table(half, attention_factor, self.limits)

    def kv_append(
        self, layout: KVLayout, num_heads: int, rotary_dim: int, sm_scale: float, dtype: str
    ) -> tirx.PrimFunc:
        return kv_append.kv_append(layout, num_heads, rotary_dim, sm_scale, dtype, self.limits)

    def kv_seal(self, layout: KVLayout, num_heads: int) -> tirx.PrimFunc:
        return kv_seal.kv_seal(layout, num_heads, self.limits)

    def paged_attention(
        self, layout: KVLayout, num_heads: int, dtype: str, variant: AttentionVariant = PLAIN
    ) -> tirx.PrimFunc:
        return paged_attention.paged_attention(layout, num_heads, dtype, variant, self.limits)

    def paged_attention_decode(
        self, layout: KVLayout, num_heads: int, dtype: str, variant: AttentionVariant = PLAIN
    ) -> tirx.PrimFunc:
        tile = decode_tile(layout, num_heads, self.limits)
        if tile is None:
            return self.paged_attention(layout, num_heads, dtype, variant)
        return decode_attention(tile, num_heads, dtype, variant)

    def kv_carry(self, layout: KVLayout) -> tirx.PrimFunc:
        return kv_carry.kv_carry(layout, self.limits)

    def _check_storage(self, storage: str) -> None:
        if storage != "float32":
            self._needs_float16("a weight in " + ("fp16" if STORAGES[storage].bits is None else "codes"))

    def linear(self, n: int, k: int, storage: str) -> tirx.PrimFunc:
        self._check_storage(storage)
        return linear.linear(n, k, storage, self.limits)

    def embedding(self, n: int, k: int, storage: str) -> tirx.PrimFunc:
        self._check_storage(storage)
        return embedding.embedding(n, k, storage, self.limits)

    def route_experts(self, num_experts: int, top_k: int, normalize: bool) -> tirx.PrimFunc:
        return experts.route_experts(num_experts, top_k, normalize, self.limits)

    def expert_linear(
        self, n: int, k: int, num_experts: int, top_k: int, shared: bool, storage: str
    ) -> tirx.PrimFunc:
        self._check_storage(storage)
        return experts.expert_linear(n, k, num_experts, top_k, shared, storage, self.limits)

    def find_tokens(self, vocab: int, drawable: int) -> tirx.PrimFunc:
        return likeliest.likeliest(vocab, drawable, self.limits)

    def rms_norm(self, dim: int, eps: float) -> tirx.PrimFunc:
        return pointwise.rms_norm(dim, eps, self.limits)

    def gate(self, dim: int, activation: str) -> tirx.PrimFunc:
        return pointwise.gate(dim, activation, self.limits)
