"""kv_carry: the tail page of a sequence, from the step's workspace to its open page."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.layout import KVLayout
from kvq.schedules.cache_arguments import carry_arguments
from kvq.schedules.statements import put, run

from .vector import CpuIsa


def kv_carry(layout: KVLayout, isa: CpuIsa) -> tirx.PrimFunc:
    """Build the kernel.

    Arguments of the kernel: :func:`kvq.schedules.cache_arguments.carry_arguments`.
    """
    lanes, unit = isa.lanes, layout.values_per_unit

    def carry(task, kv_workspace, tasks, layer, kv_open):
        source, target = (T.bind(T.cast(tasks[task, i], "int64")) for i in range(2))
        with T.serial(layout.num_kv_heads) as head, T.serial(2) as part, T.serial(unit // lanes) as j:
            at = run(j * lanes, lanes)
            put(kv_open, kv_workspace[source, head, part, at], target, layer, head, part, at)

    with IRBuilder() as script, builder.prim_func(is_private=True, s_tir=True):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        a = carry_arguments(layout)
        with T.serial(a.counts[1]) as task, T.sblock("carry"):
            index = T.axis.spatial(a.counts[1], task)
            T.reads()
            T.writes()
            carry(index, a.workspace, a.tasks, a.layer, a.kv_open)
    return script.get()
