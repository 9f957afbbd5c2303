"""The arguments of attention: one declaration for the kernels of all backends."""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.layout import KVLayout

#: int32 of a task of the contract; ``decode`` has others where a backend has a plan of its own.
TASK_FIELDS = 7
#: Floats of a scratch slot beyond the head_dim: the peak, the sum, and room for a counter.
SCRATCH_EXTRA = 8


class AttentionArguments(NamedTuple):
    """Buffers and scalars of an attention kernel, in the order of its arguments, and two of their extents."""

    q: Any
    pool: Any
    workspace: Any
    positions: Any
    table: Any
    counts: Any
    tasks: Any
    merges: Any
    sinks: Any
    layer: Any
    kv_open: Any
    scratch: Any
    out: Any
    num_open: Any
    num_tasks: Any


def attention_arguments(
    layout: KVLayout, num_heads: int, dtype: str, sinks: bool = False, task_fields: int = TASK_FIELDS
) -> AttentionArguments:
    """Declare them, inside an ``IRBuilder``'s ``prim_func``.

    In order: q ``float32[n, Hq, D]`` (rotated, scaled), kv_pool, kv_workspace, positions, page_table,
    plan_counts, attention_tasks ``int32[.., task_fields]``, merge_tasks, sinks ``float32[Hq]`` (None
    without), layer, kv_open, attention_scratch and out ``dtype[n, Hq, D]``; ``docs/design.md`` says more.
    """
    dim = layout.head_dim

    def size(name: str):
        return IRBuilder.name(name, T.int64())

    def buffer(name: str, shape, kind: str):
        return builder.arg(name, T.Buffer(shape, kind))

    n, num_open, num_tasks = size("n"), size("num_open"), size("num_tasks")
    workspace = layout.workspace_shape(size("num_workspace"))
    return AttentionArguments(
        q=buffer("q", (n, num_heads, dim), "float32"),
        pool=buffer("pool", layout.pool_shape(size("num_pages")), "uint32"),
        workspace=buffer("kv_workspace", workspace, layout.row_dtype),
        positions=buffer("positions", (n,), "int32"),
        table=buffer("table", (size("table_size"),), "int32"),
        counts=buffer("counts", (4,), "int32"),
        tasks=buffer("tasks", (num_tasks, task_fields), "int32"),
        merges=buffer("merges", (size("num_merges"), 3), "int32"),
        sinks=buffer("sinks", (num_heads,), "float32") if sinks else None,
        layer=builder.arg("layer", T.int64()),
        kv_open=buffer("kv_open", layout.open_shape(num_open), layout.row_dtype),
        scratch=buffer("scratch", (size("num_slots"), num_heads, dim + SCRATCH_EXTRA), "float32"),
        out=buffer("out", (n, num_heads, dim), dtype),
        num_open=num_open,
        num_tasks=num_tasks,
    )
