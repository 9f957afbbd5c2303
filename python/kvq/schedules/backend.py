"""What the passes ask of a backend: a kernel of each kind, built for the device.

Each folder beside this file answers it with one class in its ``backend.py``; the passes know no other name.
A kernel's arguments are the same on every device; its docstring in ``cpu/`` says what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tvm import tirx

from kvq.layout import KVLayout

from .attention_variant import PLAIN, AttentionVariant


@dataclass(frozen=True)
class DecodeShape:
    """How a kernel for steps of one row a sequence wants its work cut (:mod:`kvq.runtime.decode_plan`).

    Attributes
    ----------
    task_fields : int
        int32 of a task.
    blocks_per_sm, warps : int
        Blocks that share a multiprocessor, and warps of a block.
    """

    task_fields: int
    blocks_per_sm: int
    warps: int


@dataclass(frozen=True)
class AttentionShape:
    """How a backend's attention wants its work cut; it goes into the library's metadata.

    Attributes
    ----------
    split_pages : int
        Key pages of a split.
    tile_rows : int
        Most rows of a task.
    scratch_slots : int
        Partial results that the scratch holds.
    scratch_extra : int
        Floats of a scratch slot beyond the head_dim.
    decode : DecodeShape or None
        Of the kernel for ``decode``, where it is another one.
    """

    split_pages: int
    tile_rows: int
    scratch_slots: int
    scratch_extra: int
    decode: DecodeShape | None = None


@dataclass(frozen=True)
class Preparation:
    """How the kernels want a stored tensor: a kernel that makes it, and what comes out.

    Attributes
    ----------
    name : str
        Name of the ``prepare_*`` function, the same for equal kernels.
    build : callable
        Makes the kernel, from the stored tensor to the prepared one.
    shape, dtype
        The prepared tensor.
    """

    name: str
    build: Callable[[], tirx.PrimFunc]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class RowSource:
    """What the rows of a product of rounded activations are, when it gets them.

    Attributes
    ----------
    rounded : bool
        Whether they are rounded; else they are float32, and the product rounds them.
    eps : float or None
        The product normalizes float32 rows before: ``x / sqrt(mean(x**2) + eps) * gain``.
    """

    rounded: bool = True
    eps: float | None = None


ROUNDED = RowSource()


class RoundedKernels(Protocol):
    """Products with activations of less precision: codes of int8 on a CPU, fp16 or bf16 for tensor cores.

    Attributes
    ----------
    name : str
        Of the precision, for the names of kernels.
    activations : str
        What activations are rounded to, for people: ``int8``, ``float16`` or ``bfloat16``.
    """

    @property
    def name(self) -> str: ...

    @property
    def activations(self) -> str: ...

    def takes(self, k: int, storage: str) -> bool:
        """Whether there is such a product with a weight of ``k`` inputs, stored this way."""
        ...

    def row_type(self, k: int) -> tuple[int, str]:
        """Width and dtype of a rounded row of ``k`` activations."""
        ...

    def row_order(self, most_rows: int | None) -> str:
        """How the numbers of a rounded row lie for products of up to ``most_rows`` rows; empty: as they are.

        Part of the names of kernels; those that round take it.
        """
        ...

    def quantize_rows(self, k: int, order: str = "") -> tirx.PrimFunc:
        """Round activations."""
        ...

    def linear(
        self,
        n: int,
        k: int,
        storage: str,
        residual: bool = False,
        most_rows: int | None = None,
        rows: RowSource = ROUNDED,
    ) -> tirx.PrimFunc | None:
        """Multiply rounded activations by a weight, and add the residual if there is one.

        ``most_rows`` is one of the backend's ``row_limits``, None for any number of rows. None where a kernel
        of its own must round ``rows``.
        """
        ...

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
        """Multiply, gate and round, into an order; None where these are kernels of their own."""
        ...

    def rms_norm(self, dim: int, eps: float, order: str = "") -> tirx.PrimFunc:
        """Normalize and round."""
        ...

    def gate(self, dim: int, activation: str, order: str = "") -> tirx.PrimFunc:
        """Gate and round."""
        ...


class Kernels(Protocol):
    """The kernels of a backend.

    Attributes
    ----------
    rounded : RoundedKernels or None
        None where activations stay as they are at every optimization level.
    row_limits : tuple of int
        Numbers of rows up to which a step has kernels of its own, in rising order.
    layout_order : str
        ``KVLayout.order`` of its pages.
    prepares_experts : bool
        Whether the matrices of experts are prepared as other weights are.
    token_function : str or None
        What finds tokens of logits: ``draw`` (:mod:`kvq.runtime.sampler`), or ``likeliest``; None: the host.
    """

    @property
    def rounded(self) -> RoundedKernels | None: ...

    @property
    def row_limits(self) -> tuple[int, ...]: ...

    @property
    def layout_order(self) -> str: ...

    @property
    def prepares_experts(self) -> bool: ...

    @property
    def token_function(self) -> str | None: ...

    def attention_shape(self, layout: KVLayout, num_heads: int) -> AttentionShape:
        """How attention is cut into tasks."""
        ...

    def prepare_vector(self, n: int, dtype: str) -> Preparation | None:
        """A stored vector, to float32; None: as it is."""
        ...

    def prepare_codes(self, n: int, k: int, storage: str) -> Preparation | None:
        """Stored int4 codes ``uint32[n, k / 8]``."""
        ...

    def prepare_matrix(self, n: int, columns: int, dtype: str, storage: str) -> Preparation | None:
        """A stored matrix ``[n, columns]``: an unquantized weight, int8 codes in words, scales or offsets."""
        ...

    def rope_table(self, half: int, attention_factor: float) -> tirx.PrimFunc:
        """Cosines and sines of a step's positions."""
        ...

    def kv_append(
        self, layout: KVLayout, num_heads: int, rotary_dim: int, sm_scale: float, dtype: str
    ) -> tirx.PrimFunc:
        """RoPE, rotation of V, and the rows into their row pages."""
        ...

    def kv_seal(self, layout: KVLayout, num_heads: int) -> tirx.PrimFunc:
        """Full row pages to sealed pages."""
        ...

    def paged_attention(
        self, layout: KVLayout, num_heads: int, dtype: str, variant: AttentionVariant = PLAIN
    ) -> tirx.PrimFunc:
        """Attention over sealed pages and the row page; CompileError where there is none of the variant."""
        ...

    def paged_attention_decode(
        self, layout: KVLayout, num_heads: int, dtype: str, variant: AttentionVariant = PLAIN
    ) -> tirx.PrimFunc:
        """The same for one row a sequence, if ``attention_shape`` names a plan of its own for it."""
        ...

    def kv_carry(self, layout: KVLayout) -> tirx.PrimFunc:
        """Tail pages from the workspace to the open pages."""
        ...

    def linear(self, n: int, k: int, storage: str) -> tirx.PrimFunc:
        """Multiply float32 rows by a weight, stored as :mod:`kvq.quantization.storage` says."""
        ...

    def embedding(self, n: int, k: int, storage: str) -> tirx.PrimFunc:
        """Rows of a weight, as float32."""
        ...

    def route_experts(self, num_experts: int, top_k: int, normalize: bool) -> tirx.PrimFunc:
        """The likeliest experts of each row, and their weights."""
        ...

    def expert_linear(
        self, n: int, k: int, num_experts: int, top_k: int, shared: bool, storage: str
    ) -> tirx.PrimFunc:
        """Multiply each row, or each of its ``top_k`` inputs, by the matrices of its experts."""
        ...

    def find_tokens(self, vocab: int, drawable: int) -> tirx.PrimFunc:
        """The kernel of ``token_function``, over the first ``drawable`` ids of each row."""
        ...

    def rms_norm(self, dim: int, eps: float) -> tirx.PrimFunc:
        """Normalize float32 rows."""
        ...

    def gate(self, dim: int, activation: str) -> tirx.PrimFunc:
        """The gated activation of float32 rows, ``silu`` or ``gelu_tanh``."""
        ...
