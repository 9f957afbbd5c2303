"""The portable GPU backend: one set of kernels for Metal, Vulkan, OpenCL and WebGPU; weights as stored."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from kvq.errors import CompileError
from kvq.layout import KVLayout
from kvq.quantization.storage import STORAGES
from kvq.schedules.attention_variant import PLAIN, AttentionVariant
from kvq.schedules.backend import AttentionShape, Preparation

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

    def _needs_float16(self, what: str) -> None:
        if not self.limits.float16:
            raise CompileError(
                f"{self.device} is compiled for GPUs without fp16, which {what} needs: use q0f32"
            )

    def attention_shape(self, layout: KVLayout, num_heads: int) -> AttentionShape:
        from .paged_attention import attention_shape

        if layout.row_dtype == "float16":
            self._needs_float16("a cache of fp16 rows")
        return attention_shape(layout, num_heads, self.limits)

    def prepare_vector(self, n: int, dtype: str) -> Preparation | None:
        from .linear import prepare_vector

        if dtype == "float32":
            return None
        self._needs_float16("a weight in fp16")
        return Preparation(
            f"prepare_vector_{n}", lambda: prepare_vector(n, dtype, self.limits), (n,), "float32"
        )

    def prepare_codes(self, n: int, k: int, storage: str) -> None:
        return None

    def prepare_matrix(self, n: int, columns: int, dtype: str, storage: str) -> None:
        return None

    def rope_table(self, half: int, attention_factor: float) -> tirx.PrimFunc:
        from .rope_table import rope_table

        return rope_table(half, attention_factor, self.limits)

    def kv_append(
        self, layout: KVLayout, num_heads: int, rotary_dim: int, sm_scale: float, dtype: str
    ) -> tirx.PrimFunc:
        from .kv_append import kv_append

        return kv_append(layout, num_heads, rotary_dim, sm_scale, dtype, self.limits)

    def kv_seal(self, layout: KVLayout, num_heads: int) -> tirx.PrimFunc:
        from .kv_seal import kv_seal

        return kv_seal(layout, num_heads, self.limits)

    def paged_attention(
        self, layout: KVLayout, num_heads: int, dtype: str, variant: AttentionVariant = PLAIN
    ) -> tirx.PrimFunc:
        from .paged_attention import paged_attention

        return paged_attention(layout, num_heads, dtype, variant, self.limits)

    def paged_attention_decode(
        self, layout: KVLayout, num_heads: int, dtype: str, variant: AttentionVariant = PLAIN
    ) -> tirx.PrimFunc:
        return self.paged_attention(layout, num_heads, dtype, variant)

    def kv_carry(self, layout: KVLayout) -> tirx.PrimFunc:
        from .kv_carry import kv_carry

        return kv_carry(layout, self.limits)

    def _check_storage(self, storage: str) -> None:
        if storage != "float32":
            self._needs_float16("a weight in " + ("fp16" if STORAGES[storage].bits is None else "codes"))

    def linear(self, n: int, k: int, storage: str) -> tirx.PrimFunc:
        from .linear import linear

        self._check_storage(storage)
        return linear(n, k, storage, self.limits)

    def embedding(self, n: int, k: int, storage: str) -> tirx.PrimFunc:
        from .embedding import embedding

        self._check_storage(storage)
        return embedding(n, k, storage, self.limits)

    def route_experts(self, num_experts: int, top_k: int, normalize: bool) -> tirx.PrimFunc:
        from .experts import route_experts

        return route_experts(num_experts, top_k, normalize, self.limits)

    def expert_linear(
        self, n: int, k: int, num_experts: int, top_k: int, shared: bool, storage: str
    ) -> tirx.PrimFunc:
        from .experts import expert_linear

        self._check_storage(storage)
        return expert_linear(n, k, num_experts, top_k, shared, storage, self.limits)

    def draw(self, vocab: int, drawable: int) -> None:
        return None

    def likeliest(self, vocab: int, drawable: int) -> tirx.PrimFunc:
        from .likeliest import likeliest

        return likeliest(vocab, drawable, self.limits)

    def rms_norm(self, dim: int, eps: float) -> tirx.PrimFunc:
        from .pointwise import rms_norm

        return rms_norm(dim, eps, self.limits)

    def gate(self, dim: int, activation: str) -> tirx.PrimFunc:
        from .pointwise import gate

        return gate(dim, activation, self.limits)
