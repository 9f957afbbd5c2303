"""kv_carry: the tail page of a sequence from the workspace to its open page, at the end of a step."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from kvq.layout import KVLayout

from .block import ATTRIBUTES, for_threads, put

THREADS = 256


def kv_carry(layout: KVLayout) -> tirx.PrimFunc:
    """Build the kernel.

    Arguments of the kernel: kv_workspace, plan_counts ``int32[4]``, carry_tasks ``int32[., 2]`` (page
    of the workspace, counted from 0; open page), layer, and kv_open (written in place).
    """
    kv_heads, layers, unit = layout.num_kv_heads, layout.num_layers, layout.values_per_unit
    lanes = 8 if layout.row_dtype == "float16" else 4

    def carry(task, head, thread, kv_workspace, tasks, layer, kv_open):
        source = T.bind(T.cast(tasks[task, 0], "int64"))
        target = T.bind(T.cast(tasks[task, 1], "int64"))
        for part in range(2):

            def copy(i, part=part):
                at = T.ramp(i * lanes, 1, lanes)
                put(kv_open, kv_workspace[source, head, part, at], target, layer, head, part, at)

            for_threads(unit // lanes, thread, THREADS, copy)

    @T.prim_func(private=True)
    def kv_carry(
        workspace_h: T.handle,
        counts: T.Buffer((4,), "int32"),
        tasks_h: T.handle,
        layer: T.int64,
        open_h: T.handle,
    ):
        T.func_attr(ATTRIBUTES)
        num_open = T.int64()
        num_workspace = T.int64()
        num_tasks = T.int64()
        kv_workspace = T.match_buffer(workspace_h, (num_workspace, kv_heads, 2, unit), layout.row_dtype)
        tasks = T.match_buffer(tasks_h, (num_tasks, 2), "int32")
        kv_open = T.match_buffer(open_h, (num_open, layers, kv_heads, 2, unit), layout.row_dtype)
        T.device_entry()
        head, task = T.cta_id([kv_heads, T.cast(num_tasks, "int32")])
        thread = T.thread_id([THREADS])
        if task < counts[1]:
            carry(task, head, thread, kv_workspace, tasks, layer, kv_open)

    return kv_carry
