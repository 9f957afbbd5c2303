"""kv_carry: the tail page of a sequence from the workspace to its open page, at the end of a step."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.layout import KVLayout
from kvq.schedules.cache_arguments import carry_arguments
from kvq.schedules.statements import for_threads, put

from .block import ATTRIBUTES

THREADS = 256


def kv_carry(layout: KVLayout) -> tirx.PrimFunc:
    """Build the kernel.

    Arguments of the kernel: :func:`kvq.schedules.cache_arguments.carry_arguments`.
    """
    unit = layout.values_per_unit
    lanes = 8 if layout.row_dtype == "float16" else 4

    def carry(task, head, thread, kv_workspace, tasks, layer, kv_open):
        source = T.bind(T.cast(tasks[task, 0], "int64"))
        target = T.bind(T.cast(tasks[task, 1], "int64"))
        for part in range(2):

            def copy(i, part=part):
                at = T.ramp(i * lanes, 1, lanes)
                put(kv_open, kv_workspace[source, head, part, at], target, layer, head, part, at)

            for_threads(unit // lanes, thread, THREADS, copy)

    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        a = carry_arguments(layout)
        T.device_entry()
        head, task = T.cta_id([layout.num_kv_heads, T.cast(a.num_tasks, "int32")])
        thread = T.thread_id([THREADS])
        with T.If(task < a.counts[1]), T.Then():
            carry(task, head, thread, a.workspace, a.tasks, a.layer, a.kv_open)
    return script.get()
