"""kv_carry: the tail page of a sequence from the workspace to its open page, at the end of a step."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.layout import KVLayout
from kvq.schedules.cache_arguments import carry_arguments
from kvq.schedules.statements import for_threads, put, when

from .block import ATTRIBUTES, launch
from .limits import GpuLimits

_THREADS = 256


def kv_carry(layout: KVLayout, limits: GpuLimits) -> tirx.PrimFunc:
    """Build the kernel.

    Arguments of the kernel: :func:`kvq.schedules.cache_arguments.carry_arguments`. One workgroup for each
    entry of the list, head and part; those beyond the count have nothing to do.
    """
    threads = min(_THREADS, limits.threads)

    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        a = carry_arguments(layout, "int32")
        blocks = [2 * layout.num_kv_heads, T.cast(a.num_tasks, "int32")]
        with launch(blocks, threads) as (unit, task, thread):
            head, part = T.bind(T.shift_right(unit, 1)), T.bind(T.bitwise_and(unit, 1))

            def copy():
                source, target = T.bind(a.tasks[task, 0]), T.bind(a.tasks[task, 1])

                def one(i):
                    put(a.kv_open, a.workspace[source, head, part, i], target, a.layer, head, part, i)

                for_threads(layout.values_per_unit, thread, threads, one)

            when(task < a.counts[1], copy)
    return script.get()
