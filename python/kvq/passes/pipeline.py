"""The order of the passes: the table of contents of the compiler."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.ir.transform import Pass

from kvq.quantization.scheme import KVQuantization
from kvq.schedules.backend import Kernels

from .add_draw import AddDraw
from .attach_metadata import AttachMetadata
from .bound_rows import BoundRows
from .fuse_pointwise import FusePointwise
from .lower_experts import LowerExperts
from .lower_kv_cache import LowerPagedKVCache
from .lower_weights import LowerWeights, WeightPlan
from .specialize_rows import SpecializeRows


def kvq_pipeline(
    *,
    kv: KVQuantization,
    page_size: int,
    row_dtype: str,
    weights: WeightPlan,
    exact: bool,
    kernels: Kernels,
    vocab: int,
    drawable: int,
    most_rows: dict[str, int],
    lower: Pass,
    metadata: dict[str, Any],
) -> list[tuple[str, Pass]]:
    """The passes that make code for TVM's virtual machine of a frontend module, named, in order.

    ``lower`` is TVM's own pipeline for the target: legalize, fuse, plan memory, lower. The metadata come
    last: they say what the memory came to.
    """
    return [
        ("lower_kv_cache", LowerPagedKVCache(kv, page_size, row_dtype, kernels)),
        ("specialize_rows", SpecializeRows(kernels.row_limits)),
        ("lower_experts", LowerExperts(kernels)),
        ("lower_weights", LowerWeights(weights, exact)),
        ("fuse_pointwise", FusePointwise(kernels)),
        ("fold_reshapes", relax.transform.CanonicalizeBindings()),
        ("remove_dead_code", relax.transform.DeadCodeElimination()),
        ("add_draw", AddDraw(vocab, drawable, kernels)),
        ("bound_rows", BoundRows(most_rows)),
        ("lower", lower),
        ("attach_metadata", AttachMetadata(metadata)),
    ]


def run_pipeline(mod: tvm.IRModule, passes: list[tuple[str, Pass]], on_stage: Any = None) -> tvm.IRModule:
    """Run named passes in order; ``on_stage(number, name, mod)`` sees the module after each."""
    for number, (name, one) in enumerate(passes, start=1):
        mod = one(mod)
        if on_stage is not None:
            on_stage(number, name, mod)
    return mod
