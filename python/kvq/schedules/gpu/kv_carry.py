"""kv_carry: the tail page of a sequence from the workspace to its open page, at the end of a step."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.layout import KVLayout

from .block import ATTRIBUTES, for_threads, launch, put, when
from .limits import GpuLimits

_THREADS = 256


def kv_carry(layout: KVLayout, limits: GpuLimits) -> tirx.PrimFunc:
    """Build the kernel.

    Arguments of the kernel: kv_workspace, plan_counts ``int32[4]``, carry_tasks ``int32[., 2]`` (page
    of the workspace, counted from 0; open page), layer, and kv_open (written in place). One workgroup for
    each entry of the list, head and part; those beyond the count have nothing to do.
    """
    threads = min(_THREADS, limits.threads)

    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        sizes = [IRBuilder.name(name, T.int64()) for name in ("num_workspace", "num_tasks", "num_open")]
        shape = layout.workspace_shape(sizes[0])
        kv_workspace = builder.arg("kv_workspace", T.Buffer(shape, layout.row_dtype))
        counts = builder.arg("counts", T.Buffer((4,), "int32"))
        tasks = builder.arg("tasks", T.Buffer((sizes[1], 2), "int32"))
        layer = builder.arg("layer", T.int64())
        kv_open = builder.arg("kv_open", T.Buffer(layout.open_shape(sizes[2]), layout.row_dtype))
        blocks = [2 * layout.num_kv_heads, T.cast(sizes[1], "int32")]
        with launch(blocks, threads) as (unit, task, thread):
            head, part = T.bind(T.shift_right(unit, 1)), T.bind(T.bitwise_and(unit, 1))

            def copy():
                source, target = T.bind(tasks[task, 0]), T.bind(tasks[task, 1])

                def one(i):
                    put(kv_open, kv_workspace[source, head, part, i], target, layer, head, part, i)

                for_threads(layout.values_per_unit, thread, threads, one)

            when(task < counts[1], copy)
    return script.get()
