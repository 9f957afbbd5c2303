"""kv_carry: the tail page of a sequence, from the step's workspace to its open page."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from kvq.layout import KVLayout

from .vector import CpuIsa, run


def kv_carry(layout: KVLayout, isa: CpuIsa) -> tirx.PrimFunc:
    """Build the kernel.

    Arguments of the kernel: kv_workspace, plan_counts ``int32[4]``, carry_tasks ``int32[., 2]`` (page
    of the workspace, counted from 0; open page), layer, and kv_open (written in place).
    """
    kv_heads, layers, unit = layout.num_kv_heads, layout.num_layers, layout.values_per_unit

    @T.prim_func(s_tir=True, private=True)
    def kv_carry(
        workspace_h: T.handle,
        counts: T.Buffer((4,), "int32"),
        tasks_h: T.handle,
        layer: T.int64,
        open_h: T.handle,
    ):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        num_open = T.int64()
        num_workspace = T.int64()
        num_tasks = T.int64()
        kv_workspace = T.match_buffer(workspace_h, (num_workspace, kv_heads, 2, unit), layout.row_dtype)
        tasks = T.match_buffer(tasks_h, (num_tasks, 2), "int32")
        kv_open = T.match_buffer(open_h, (num_open, layers, kv_heads, 2, unit), layout.row_dtype)
        for task in T.serial(counts[1]):
            for head in T.serial(kv_heads):
                for part in T.serial(2):
                    for j in T.serial(unit // isa.lanes):
                        with T.sblock("carry"):
                            vt, vh, vp, vj = T.axis.remap("SSSS", [task, head, part, j])
                            T.reads()
                            T.writes()
                            source: T.let = T.cast(tasks[vt, 0], "int64")
                            target: T.let = T.cast(tasks[vt, 1], "int64")
                            kv_open[target, layer, vh, vp, run(vj * isa.lanes, isa.lanes)] = kv_workspace[
                                source, vh, vp, run(vj * isa.lanes, isa.lanes)
                            ]

    return kv_carry
