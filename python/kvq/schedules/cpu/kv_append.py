"""kv_append: RoPE, rotation of V, and the step's rows into their row pages.

One task is one row. Q leaves rotated and scaled, float32 ``[n, Hq, D]``, ready for attention. K goes to
``[D, P]`` (a column of its row page), V, rotated if values are quantized, to ``[P, D]``. A NaN is stored
as 0 and a magnitude beyond fp16 as 65504; both are counted per row in ``kv_faults``.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.layout import KVLayout
from kvq.schedules.cache_arguments import append_arguments
from kvq.schedules.statements import put, run

from .row_ops import clean_row, hadamard_inplace, load_rotated, load_row, vector_lanes
from .vector import CpuIsa, for_rows, splat


def kv_append(
    layout: KVLayout, num_heads: int, rotary_dim: int, sm_scale: float, dtype: str, isa: CpuIsa
) -> tirx.PrimFunc:
    """Build the kernel.

    Arguments of the kernel: :func:`kvq.schedules.cache_arguments.append_arguments`.
    """
    kv_heads, dim, page = layout.num_kv_heads, layout.head_dim, layout.page_size
    row_dtype, lanes = layout.row_dtype, vector_lanes(dim, isa.lanes)

    def store(kv_open, kv_workspace, num_open, slot, layer, head, part, h):
        at = T.bind(T.cast(T.shift_right(slot, T.int32(page.bit_length() - 1)), "int64"))
        offset = T.bind(T.bitwise_and(slot, T.int32(page - 1)))
        with T.If(at < num_open):
            with T.Then(), T.serial(dim) as e:
                put(
                    kv_open, h[e], at, layer, head, part, e * page + offset if part == 0 else offset * dim + e
                )
            with T.Else(), T.serial(dim) as e:
                where = e * page + offset if part == 0 else offset * dim + e
                put(kv_workspace, h[e], at - num_open, head, part, where)

    def append_row(i, qkv, rope, slots, layer, kv_open, kv_workspace, num_open, faults, q):
        x = T.sblock_alloc_buffer((dim,), "float32")
        t = T.sblock_alloc_buffer((dim,), "float32")
        h = T.sblock_alloc_buffer((dim,), row_dtype)
        count = T.sblock_alloc_buffer((2, lanes), "int32")
        with T.serial(num_heads) as head:
            load_rotated(x, qkv, rope, i, head, dim, rotary_dim, isa.lanes)
            with T.serial(dim // lanes) as j:
                at = run(j * lanes, lanes)
                put(q, x[at] * splat(T.float32(sm_scale), lanes), i, head, at)
        for part in range(2):
            put(count, splat(T.int32(0), lanes), part, run(0, lanes))
        with T.serial(kv_heads) as head:
            load_rotated(x, qkv, rope, i, head + num_heads, dim, rotary_dim, isa.lanes)
            clean_row(x, h, count, dim, row_dtype, lanes)
            store(kv_open, kv_workspace, num_open, slots[i], layer, head, 0, h)
        with T.serial(kv_heads) as head:
            load_row(x, qkv, i, head + (num_heads + kv_heads), dim, isa.lanes)
            if layout.v_bits is not None:
                hadamard_inplace(x, t, dim)
            clean_row(x, h, count, dim, row_dtype, lanes)
            store(kv_open, kv_workspace, num_open, slots[i], layer, head, 1, h)
        for part in range(2):
            with T.serial(lanes) as j:
                put(faults, faults[i, part] + count[part, j], i, part)

    with IRBuilder() as script, builder.prim_func(is_private=True, s_tir=True):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        a = append_arguments(layout, num_heads, rotary_dim, dtype)
        rows = (a.kv_open, a.workspace, a.num_open)
        for_rows(a.n, append_row, a.qkv, a.rope, a.slots, a.layer, *rows, a.faults, a.q)
    return script.get()


def rope_table(half: int, attention_factor: float) -> tirx.PrimFunc:
    """Build the kernel that computes the cosines and sines of a step's positions, once for all layers.

    ``half`` is the number of frequencies, half the rotary dimensions.

    Arguments of the kernel: positions ``int32[n]``, inverse_frequency ``float32[half]``, out
    ``float32[n, 2 * half]``: cosines, then sines, times the attention factor of the RoPE scaling.
    """

    @T.prim_func(s_tir=True, private=True)
    def rope_table(positions_h: T.handle, frequency: T.Buffer((half,), "float32"), out_h: T.handle):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        n = T.int64()
        positions = T.match_buffer(positions_h, (n,), "int32")
        out = T.match_buffer(out_h, (n, 2 * half), "float32")
        for i in T.serial(n):
            for j in T.serial(half):
                with T.sblock("angle"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    T.reads()
                    T.writes()
                    angle: T.let = T.cast(positions[vi], "float32") * frequency[vj]
                    out[vi, vj] = T.cos(angle) * T.float32(attention_factor)
                    out[vi, half + vj] = T.sin(angle) * T.float32(attention_factor)

    return rope_table
