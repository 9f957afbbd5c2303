"""The arguments of the cache's kernels: one declaration for all backends.

The functions declare them inside an ``IRBuilder``'s ``prim_func``. ``rows`` is the dtype of how many rows,
tasks and workspace pages a step has: with int32 the indices of what they count take no 64 bits, which some
GPUs are slow with. Pages that stay are counted in int64, since a cache may have more than 2**31 elements.
"""

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


def _size(name: str, dtype: str = "int64"):
    return IRBuilder.name(name, getattr(T, dtype)())


def _buffer(name: str, shape, dtype: str):
    return builder.arg(name, T.Buffer(shape, dtype))


def _workspace(layout: KVLayout, rows: str):
    return _buffer("kv_workspace", layout.workspace_shape(_size("num_workspace", rows)), layout.row_dtype)


class AppendArguments(NamedTuple):
    """Buffers and scalars of ``kv_append``, in the order of its arguments, and two of their extents."""

    qkv: Any
    rope: Any
    slots: Any
    layer: Any
    kv_open: Any
    workspace: Any
    faults: Any
    q: Any
    n: Any
    num_open: Any


def append_arguments(
    layout: KVLayout, num_heads: int, rotary_dim: int, dtype: str, rows: str = "int64"
) -> AppendArguments:
    """Declare qkv ``dtype[n, Hq + 2 H, D]``, rope ``float32[n, rotary_dim]``, append_slots ``int32[n]``,
    layer, kv_open, kv_workspace and kv_faults (written in place), and q ``float32[n, Hq, D]``.
    """
    dim, heads = layout.head_dim, num_heads + 2 * layout.num_kv_heads
    n, num_open = _size("n", rows), _size("num_open")
    return AppendArguments(
        qkv=_buffer("qkv", (n, heads, dim), dtype),
        # a table is passed even where no position is encoded
        rope=_buffer("rope", (n, max(rotary_dim, 2)), "float32"),
        slots=_buffer("slots", (n,), "int32"),
        layer=builder.arg("layer", T.int64()),
        kv_open=_buffer("kv_open", layout.open_shape(num_open), layout.row_dtype),
        workspace=_workspace(layout, rows),
        faults=_buffer("faults", (_size("fault_rows", rows), 2), "int32"),
        q=_buffer("q", (n, num_heads, dim), "float32"),
        n=n,
        num_open=num_open,
    )


class SealArguments(NamedTuple):
    """Buffers and scalars of ``kv_seal``, in the order of its arguments, and two of their extents."""

    q: Any
    kv_open: Any
    workspace: Any
    counts: Any
    tasks: Any
    layer: Any
    pool: Any
    num_open: Any
    num_tasks: Any


def seal_arguments(layout: KVLayout, num_heads: int, rows: str = "int64") -> SealArguments:
    """Declare q ``float32[n, Hq, D]``, kv_open, kv_workspace, plan_counts, seal_tasks ``int32[., 3]``
    (row page, pool page, row of the last token), layer, and kv_pool (written in place).
    """
    num_open, num_tasks = _size("num_open"), _size("num_tasks", rows)
    return SealArguments(
        q=_buffer("q", (_size("n", rows), num_heads, layout.head_dim), "float32"),
        kv_open=_buffer("kv_open", layout.open_shape(num_open), layout.row_dtype),
        workspace=_workspace(layout, rows),
        counts=_buffer("counts", (4,), "int32"),
        tasks=_buffer("tasks", (num_tasks, 3), "int32"),
        layer=builder.arg("layer", T.int64()),
        pool=_buffer("pool", layout.pool_shape(_size("num_pages")), "uint32"),
        num_open=num_open,
        num_tasks=num_tasks,
    )


class CarryArguments(NamedTuple):
    """Buffers and scalars of ``kv_carry``, in the order of its arguments, and one of their extents."""

    workspace: Any
    counts: Any
    tasks: Any
    layer: Any
    kv_open: Any
    num_tasks: Any


def carry_arguments(layout: KVLayout, rows: str = "int64") -> CarryArguments:
    """Declare kv_workspace, plan_counts, carry_tasks ``int32[., 2]`` (page of the workspace, counted from 0;
    open page), layer, and kv_open (written in place).
    """
    num_tasks = _size("num_tasks", rows)
    return CarryArguments(
        workspace=_workspace(layout, rows),
        counts=_buffer("counts", (4,), "int32"),
        tasks=_buffer("tasks", (num_tasks, 2), "int32"),
        layer=builder.arg("layer", T.int64()),
        kv_open=_buffer("kv_open", layout.open_shape(_size("num_open")), layout.row_dtype),
        num_tasks=num_tasks,
    )


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
    layout: KVLayout,
    num_heads: int,
    dtype: str,
    sinks: bool = False,
    task_fields: int = TASK_FIELDS,
    rows: str = "int64",
) -> AttentionArguments:
    """Declare q ``float32[n, Hq, D]`` (rotated, scaled), kv_pool, kv_workspace, positions, page_table,
    plan_counts, attention_tasks ``int32[.., task_fields]``, merge_tasks, sinks ``float32[Hq]`` (None
    without), layer, kv_open, attention_scratch and out ``dtype[n, Hq, D]``.
    """
    dim = layout.head_dim
    n, num_open, num_tasks = _size("n", rows), _size("num_open"), _size("num_tasks", rows)
    return AttentionArguments(
        q=_buffer("q", (n, num_heads, dim), "float32"),
        pool=_buffer("pool", layout.pool_shape(_size("num_pages")), "uint32"),
        workspace=_workspace(layout, rows),
        positions=_buffer("positions", (n,), "int32"),
        table=_buffer("table", (_size("table_size", rows),), "int32"),
        counts=_buffer("counts", (4,), "int32"),
        tasks=_buffer("tasks", (num_tasks, task_fields), "int32"),
        merges=_buffer("merges", (_size("num_merges", rows), 3), "int32"),
        sinks=_buffer("sinks", (num_heads,), "float32") if sinks else None,
        layer=builder.arg("layer", T.int64()),
        kv_open=_buffer("kv_open", layout.open_shape(num_open), layout.row_dtype),
        scratch=_buffer("scratch", (_size("num_slots", rows), num_heads, dim + SCRATCH_EXTRA), "float32"),
        out=_buffer("out", (n, num_heads, dim), dtype),
        num_open=num_open,
        num_tasks=num_tasks,
    )
