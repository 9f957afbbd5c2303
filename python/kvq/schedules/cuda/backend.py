"""The CUDA backend: kernels in TIRx; weights that tensor cores take lie in their order, others as stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx

from kvq.errors import CompileError
from kvq.layout import KVLayout
from kvq.quantization.storage import GROUP
from kvq.runtime.metadata import DRAW
from kvq.schedules.attention_variant import PLAIN, AttentionVariant
from kvq.schedules.backend import ROUNDED, AttentionShape, DecodeShape, Preparation, RowSource
from kvq.schedules.gpu import experts
from kvq.schedules.gpu.limits import GpuLimits

from . import (
    draw,
    gemv,
    kv_append,
    kv_carry,
    kv_seal,
    linear,
    linear_few,
    linear_tiles,
    paged_attention,
    pointwise,
    prefill_attention,
    tile_attention,
    tile_sums,
    tile_tuning,
    weight_fragments,
)
from .block import overlaps
from .gemv_rows import MOST_ROWS
from .gemv_tuning import gemv_tuning
from .mma import PTX_TYPES

#: Partial results of rows that several blocks share in decode: more than any plan for one GPU makes.
DECODE_SLOTS = 1024
#: What the portable kernels of experts may use.
_EXPERTS = GpuLimits(threads=256, shared_bytes=48 * 1024)


@dataclass(frozen=True)
class CudaRoundedKernels:
    """Products on tensor cores, with activations and weights in ``float16`` or ``bfloat16``."""

    archs: tuple[str, ...]
    activations: str

    @property
    def name(self) -> str:
        return PTX_TYPES[self.activations]

    def takes(self, k: int, storage: str) -> bool:
        return weight_fragments.fits(k, storage)

    def row_type(self, k: int) -> tuple[int, str]:
        return k, self.activations

    def row_order(self, most_rows: int | None) -> str:
        few = most_rows is not None and most_rows <= linear_few.MOST_ROWS
        return "" if few else weight_fragments.OPERAND

    def quantize_rows(self, k: int, order: str = "") -> tirx.PrimFunc:
        return pointwise.round_rows(k, self.activations, overlaps(self.archs), order)

    def linear(
        self,
        n: int,
        k: int,
        storage: str,
        residual: bool = False,
        most_rows: int | None = None,
        rows: RowSource = ROUNDED,
    ) -> tirx.PrimFunc | None:
        if most_rows == MOST_ROWS and (kernel := self._gemv(n, k, storage, rows)):
            return gemv.gemv(kernel, residual)
        if rows != ROUNDED:
            return None
        if most_rows is not None and most_rows <= linear_few.MOST_ROWS:
            few = linear_few.few_tuning(n, k, storage, self.archs)
            return linear_few.linear_few(n, k, storage, few, residual, self.activations)
        tuning = tile_tuning.tile_tuning(n, storage, most_rows, self.archs)
        return linear_tiles.linear_tiles(n, k, storage, tuning, residual, dtype=self.activations)

    def _gemv(
        self, n: int, k: int, storage: str, rows: RowSource, activation: str | None = None
    ) -> gemv.Gemv | None:
        """The product for fewest rows, None where shared memory is too small for it."""
        tuning = gemv_tuning(n, k, storage, activation is not None, self.archs, self.activations)
        kernel = gemv.Gemv(n, k, storage, tuning, rows, activation, self.activations)
        return kernel if gemv.fits(kernel, self.archs) else None

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
        if most_rows == MOST_ROWS:
            kernel = self._gemv(n, k, storage, rows, activation) if gemv.gates(n) else None
            return gemv.gemv(kernel) if kernel else None
        tuning = tile_tuning.tile_tuning(n, storage, most_rows, self.archs)
        if rows != ROUNDED or order != weight_fragments.OPERAND or not tile_sums.gates(n, tuning):
            return None
        return linear_tiles.linear_tiles(n, k, storage, tuning, activation=activation, dtype=self.activations)

    def rms_norm(self, dim: int, eps: float, order: str = "") -> tirx.PrimFunc:
        return pointwise.rms_norm(dim, eps, self.activations, overlaps(self.archs), order)

    def gate(self, dim: int, activation: str, order: str = "") -> tirx.PrimFunc:
        return pointwise.gate(dim, activation, self.activations, overlaps(self.archs), order)


@dataclass(frozen=True)
class CudaKernels:
    """Kernels for NVIDIA GPUs.

    Attributes
    ----------
    archs : tuple of str
        Architectures that the library will hold, from ``sm_80`` on; they decide the tuning.
    activations : str
        What products take: ``float16`` or ``bfloat16``, rounded, for tensor cores, or ``float32``.
    """

    archs: tuple[str, ...]
    activations: str = "float32"

    layout_order = "fragments"
    prepares_experts = False
    token_function = DRAW

    @property
    def tensor_cores(self) -> bool:
        """Whether products are made by tensor cores, where these take the weight."""
        return self.activations != "float32"

    @property
    def rounded(self) -> CudaRoundedKernels | None:
        return CudaRoundedKernels(self.archs, self.activations) if self.tensor_cores else None

    @property
    def row_limits(self) -> tuple[int, ...]:
        return (MOST_ROWS, linear_few.MOST_ROWS, tile_tuning.SOME_ROWS) if self.tensor_cores else ()

    def _in_fragments(self, k: int, storage: str) -> bool:
        return self.tensor_cores and weight_fragments.fits(k, storage)

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

    def prepare_codes(self, n: int, k: int, storage: str) -> Preparation | None:
        if not self._in_fragments(k, storage):
            return None
        shape = weight_fragments.codes_shape(n, k)
        return Preparation(
            f"prepare_codes_{n}x{k}", lambda: weight_fragments.prepare_codes(n, k), shape, "uint32"
        )

    def prepare_matrix(self, n: int, columns: int, dtype: str, storage: str) -> Preparation | None:
        k = columns * GROUP if storage == "int4" else columns
        if not self._in_fragments(k, storage):
            return None
        if storage == "int4":
            shape, operand = weight_fragments.scales_shape(n, k), self.activations
            return Preparation(
                f"prepare_scales_{n}x{k}",
                lambda: weight_fragments.prepare_scales(n, k, operand),
                shape,
                operand,
            )
        shape = weight_fragments.matrix_shape(n, k)
        return Preparation(
            f"prepare_matrix_{n}x{k}",
            lambda: weight_fragments.prepare_matrix(n, k, self.activations),
            shape,
            "uint32",
        )

    def rope_table(self, half: int, attention_factor: float) -> tirx.PrimFunc:
        return kv_append.rope_table(half, attention_factor)

    def kv_append(
        self, layout: KVLayout, num_heads: int, rotary_dim: int, sm_scale: float, dtype: str
    ) -> tirx.PrimFunc:
        return kv_append.kv_append(layout, num_heads, rotary_dim, sm_scale, dtype, overlaps(self.archs))

    def kv_seal(self, layout: KVLayout, num_heads: int) -> tirx.PrimFunc:
        return kv_seal.kv_seal(layout, num_heads, overlaps(self.archs))

    def paged_attention(
        self, layout: KVLayout, num_heads: int, dtype: str, variant: AttentionVariant = PLAIN
    ) -> tirx.PrimFunc:
        if layout.row_dtype == "float16":
            return prefill_attention.prefill_attention(layout, num_heads, dtype, variant)
        if variant.sinks:
            raise CompileError(
                "cuda has no attention with sinks over float32 rows: use weights of another scheme, such as "
                "--quantization q0f16"
            )
        return tile_attention.tile_attention(layout, num_heads, dtype, variant)

    def paged_attention_decode(
        self, layout: KVLayout, num_heads: int, dtype: str, variant: AttentionVariant = PLAIN
    ) -> tirx.PrimFunc:
        if variant != PLAIN:
            return prefill_attention.prefill_attention(layout, num_heads, dtype, variant, single_rows=True)
        tuning = paged_attention.decode_tuning(layout, num_heads, self.archs)
        return paged_attention.paged_attention_decode(layout, num_heads, dtype, tuning)

    def kv_carry(self, layout: KVLayout) -> tirx.PrimFunc:
        return kv_carry.kv_carry(layout)

    def linear(self, n: int, k: int, storage: str) -> tirx.PrimFunc:
        return linear.linear(n, k, storage)

    def embedding(self, n: int, k: int, storage: str) -> tirx.PrimFunc:
        if self._in_fragments(k, storage):
            return weight_fragments.embedding(n, k, storage, self.activations)
        return linear.embedding(n, k, storage)

    def route_experts(self, num_experts: int, top_k: int, normalize: bool) -> tirx.PrimFunc:
        return experts.route_experts(num_experts, top_k, normalize, _EXPERTS)

    def expert_linear(
        self, n: int, k: int, num_experts: int, top_k: int, shared: bool, storage: str
    ) -> tirx.PrimFunc:
        return experts.expert_linear(n, k, num_experts, top_k, shared, storage, _EXPERTS)

    def find_tokens(self, vocab: int, drawable: int) -> tirx.PrimFunc:
        return draw.draw(vocab, drawable)

    def rms_norm(self, dim: int, eps: float) -> tirx.PrimFunc:
        return pointwise.rms_norm(dim, eps)

    def gate(self, dim: int, activation: str) -> tirx.PrimFunc:
        return pointwise.gate(dim, activation)
