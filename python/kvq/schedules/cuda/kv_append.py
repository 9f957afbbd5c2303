"""kv_append and rope_table: RoPE, rotation of V, and the step's rows into their row pages.

A warp has one head of one row, its lanes every 32nd channel: reads and writes are contiguous, and the
Hadamard transform is a butterfly between lanes, then between a lane's registers.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.layout import KVLayout
from kvq.schedules.cache_arguments import append_arguments
from kvq.schedules.statements import put, when

from .block import ATTRIBUTES, WARP, add, kernel_attributes, let_next_start, libm, reduce_warp, wait_for_rows
from .mma import load_global

WARPS = 4
FP16_MAX = 65504.0
FP32_MAX = 3.4028234663852886e38

_ALL_LANES = 0xFFFFFFFF


class WarpRow:
    """A warp's row of ``dim`` channels: ``x[e]`` of a lane is channel ``32 e + lane``."""

    def __init__(self, dim: int, lane) -> None:
        self.dim, self.lane = dim, lane
        self.size = -(-dim // WARP)
        self.x = T.alloc_local((self.size,), "float32")

    def each(self, body) -> None:
        """Emit ``body(e, channel)`` for every channel of the lane."""
        for e in range(self.size):
            channel = T.bind(self.lane + e * WARP)
            if (e + 1) * WARP <= self.dim:
                body(e, channel)
            else:
                when(channel < self.dim, lambda e=e, channel=channel: body(e, channel))

    def clear(self) -> None:
        """Zeros, also where the lane has no channel."""
        for e in range(self.size):
            put(self.x, T.float32(0), e)

    def load(self, qkv, rope, row, head, rotary_dim: int) -> None:
        """Read ``qkv[row, head]``, its first ``rotary_dim`` channels rotated in pairs half of them apart."""
        half = rotary_dim // 2
        self.clear()

        def read(e, channel):
            value = T.bind(T.cast(qkv[row, head, channel], "float32"))
            put(self.x, value, e)
            if half == 0 or e * WARP >= rotary_dim:
                return

            def rotate():
                first = channel < half
                partner = T.bind(T.Select(first, channel + half, channel - half))
                angle = T.bind(T.Select(first, channel, channel - half))
                other = T.cast(qkv[row, head, partner], "float32") * rope[row, angle + half]
                turned = value * rope[row, angle]
                put(self.x, turned + T.Select(first, T.float32(0) - other, other), e)

            if (e + 1) * WARP <= rotary_dim:
                rotate()
            else:
                when(channel < rotary_dim, rotate)

        self.each(read)

    def rotate_values(self) -> None:
        """Multiply by the orthonormal, block-diagonal Hadamard matrix."""
        block = self.dim & -self.dim
        stride = 1
        while stride < min(block, WARP):
            upper = T.bind(T.bitwise_and(self.lane, stride) != 0)
            for e in range(self.size):
                mine = T.bind(self.x[e])
                other = T.tvm_warp_shuffle_xor(T.uint32(_ALL_LANES), mine, stride, WARP, WARP)
                put(self.x, T.Select(upper, T.float32(0) - mine, mine) + other, e)
            stride *= 2
        while stride < block:
            step = stride // WARP
            for e in range(self.size):
                if not e & step:
                    a, b = T.bind(self.x[e]), T.bind(self.x[e + step])
                    put(self.x, a + b, e)
                    put(self.x, a - b, e + step)
            stride *= 2
        for e in range(self.size):
            put(self.x, self.x[e] * T.float32(float(block) ** -0.5), e)

    def clean(self, row_dtype: str, faults, row) -> None:
        """NaN to 0 and magnitudes saturated, counted in ``faults[row]``."""
        limit = FP16_MAX if row_dtype == "float16" else FP32_MAX
        count = T.alloc_local((2,), "int32")
        for part in range(2):
            put(count, T.int32(0), part)
        for e in range(self.size):
            raw = T.bind(self.x[e])
            # by its bits: a comparison with itself would be simplified away
            magnitude = T.bitwise_and(T.reinterpret("int32", raw), T.int32(0x7FFFFFFF))
            is_nan = T.bind(magnitude > T.int32(0x7F800000))
            number = T.bind(T.Select(is_nan, T.float32(0), raw))
            kept = T.bind(T.max(T.min(number, T.float32(limit)), T.float32(-limit)))
            put(count, count[0] + T.Select(is_nan, T.int32(1), T.int32(0)), 0)
            put(count, count[1] + T.Select(kept != number, T.int32(1), T.int32(0)), 1)
            put(self.x, kept, e)
        for part in range(2):
            total = reduce_warp(add, count[part])
            happened = T.And(self.lane == 0, total > 0)
            when(
                happened,
                lambda part=part, total=total: T.evaluate(
                    T.cuda.atomic_add(T.address_of(faults[row, part]), total)
                ),
            )


def kv_append(
    layout: KVLayout, num_heads: int, rotary_dim: int, sm_scale: float, dtype: str, overlap: bool = False
) -> tirx.PrimFunc:
    """Build the kernel; with ``overlap`` it starts while the one before it runs.

    Arguments of the kernel: :func:`kvq.schedules.cache_arguments.append_arguments`.
    """
    kv_heads, dim, page = layout.num_kv_heads, layout.head_dim, layout.page_size
    row_dtype, total_heads = layout.row_dtype, num_heads + 2 * kv_heads

    def append_head(row, head, lane, qkv, rope, slot, layer, kv_open, kv_workspace, num_open, faults, q):
        line = WarpRow(dim, lane)

        def query():
            line.load(qkv, rope, row, head, rotary_dim)
            line.each(lambda e, channel: put(q, line.x[e] * T.float32(sm_scale), row, head, channel))

        def store(part: int):
            line.clean(row_dtype, faults, row)
            kv_head = T.bind(head - (num_heads + part * kv_heads))
            at = T.bind(T.cast(T.shift_right(slot, T.int32(page.bit_length() - 1)), "int64"))
            offset = T.bind(T.bitwise_and(slot, T.int32(page - 1)) * dim)

            def write(e, channel):
                value = T.bind(T.cast(line.x[e], row_dtype))
                with T.If(at < num_open):
                    with T.Then():
                        put(kv_open, value, at, layer, kv_head, part, offset + channel)
                    with T.Else():
                        put(kv_workspace, value, at - num_open, kv_head, part, offset + channel)

            line.each(write)

        def key():
            line.load(qkv, rope, row, head, rotary_dim)
            store(0)

        def value():
            line.load(qkv, rope, row, head, 0)
            if layout.v_bits is not None:
                line.rotate_values()
            store(1)

        when(head < num_heads, query)
        when(T.And(head >= num_heads, head < num_heads + kv_heads), key)
        when(T.And(head >= num_heads + kv_heads, head < total_heads), value)

    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(kernel_attributes(overlap))
        a = append_arguments(layout, num_heads, rotary_dim, dtype)
        T.device_entry()
        group, row = T.cta_id([-(-total_heads // WARPS), T.cast(a.n, "int32")])
        thread = T.thread_id([WARPS * WARP])
        let_next_start(overlap)
        # of the plan, which nothing in the step writes
        slots = T.alloc_local((1,), "int32")
        load_global(slots, 0, 1, a.slots.ptr_to([row]), kind="s32")
        slot = T.bind(slots[0])
        wait_for_rows(overlap)
        head, lane = T.bind(group * WARPS + T.shift_right(thread, 5)), T.bind(T.bitwise_and(thread, WARP - 1))
        rows = (a.kv_open, a.workspace, a.num_open)
        append_head(row, head, lane, a.qkv, a.rope, slot, a.layer, *rows, a.faults, a.q)
    return script.get()


def rope_table(half: int, attention_factor: float) -> tirx.PrimFunc:
    """Build the kernel that computes the cosines and sines of a step's positions, once for all layers.

    Arguments of the kernel: positions ``int32[n]``, inverse_frequency ``float32[half]``, out
    ``float32[n, 2 * half]``: cosines, then sines, times the attention factor of the RoPE scaling.
    """

    def angles(row, thread, positions, frequency, out):
        def angle():
            value = T.bind(T.cast(positions[row], "float32") * frequency[thread])
            put(out, libm("cosf", value) * T.float32(attention_factor), row, thread)
            put(out, libm("sinf", value) * T.float32(attention_factor), row, thread + half)

        when(thread < half, angle)

    @T.prim_func(private=True)
    def rope_table(positions_h: T.handle, frequency: T.Buffer((half,), "float32"), out_h: T.handle):
        T.func_attr(ATTRIBUTES)
        n = T.int64()
        positions = T.match_buffer(positions_h, (n,), "int32")
        out = T.match_buffer(out_h, (n, 2 * half), "float32")
        T.device_entry()
        row = T.cta_id([T.cast(n, "int32")])
        thread = T.thread_id([128])
        angles(row, thread, positions, frequency, out)

    return rope_table
