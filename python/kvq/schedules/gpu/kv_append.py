"""kv_append: RoPE, rotation of V, and the step's rows into their row pages.

A row has a workgroup for its keys and values, which counts what it had to replace, and further ones for its
queries. Values are rotated in shared memory, some heads at a time.
"""

from __future__ import annotations

import numpy as np
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.layout import KVLayout
from kvq.schedules.cache_arguments import append_arguments
from kvq.schedules.statements import for_threads, put, when

from .block import ATTRIBUTES, add, launch, local, reduce_lanes, shared, sync
from .hadamard import rotate
from .limits import GpuLimits

_THREADS = 256
#: Floats that are worked on at once: values of some heads in shared memory, queries of a workgroup.
_BATCH = 2048
_LARGEST = {"float16": 65504.0, "float32": 3.4028234663852886e38}


class _Row:
    """Statements for one row, with the static geometry at hand."""

    def __init__(self, layout: KVLayout, rotary_dim: int, threads: int, thread, arguments) -> None:
        self.layout, self.dim, self.half = layout, layout.head_dim, rotary_dim // 2
        self.threads, self.thread = threads, thread
        self.row, self.qkv, self.rope = arguments

    def split(self, i):
        """Head and channel of number ``i`` of consecutive heads."""
        return T.bind(T.truncdiv(i, self.dim)), T.bind(T.truncmod(i, self.dim))

    def raw(self, head, channel):
        """A number of the row as it came, float32."""
        return T.cast(self.qkv[self.row, head, channel], "float32")

    def rotated(self, head, channel):
        """The same after RoPE, whose pairs are half the rotary dimensions apart."""
        value = T.bind(self.raw(head, channel))
        if not self.half:
            return value
        angle = T.bind(T.truncmod(channel, self.half))
        partner = T.bind(T.truncmod(channel + self.half, 2 * self.half))
        # a factor: of two products to select from, both would be read, one from before the row
        sign = T.bind(T.Select(channel < self.half, T.float32(-1), T.float32(1)))
        other = self.raw(head, partner) * self.rope[self.row, angle + self.half]
        turned = T.bind(value * self.rope[self.row, angle] + sign * other)
        if 2 * self.half == self.dim:
            return turned
        return T.bind(T.Select(channel < 2 * self.half, turned, value))

    def clean(self, raw, count):
        """NaN to 0 and magnitudes saturated, as ``row_dtype``; both are added to ``count[2]``."""
        limit = _LARGEST[self.layout.row_dtype]
        # by its bits: a comparison with itself would be simplified away
        magnitude = T.bind(T.bitwise_and(T.reinterpret("int32", raw), T.int32(0x7FFFFFFF)))
        is_nan = T.bind(magnitude > T.int32(0x7F800000))
        over = magnitude > T.int32(int(np.float32(limit).view(np.int32)))
        saturated = T.bind(T.And(over, T.Not(is_nan)))
        put(count, count[0] + T.Select(is_nan, 1, 0), 0)
        put(count, count[1] + T.Select(saturated, 1, 0), 1)
        end = T.Select(raw < T.float32(0), T.float32(-limit), T.float32(limit))
        number = T.Select(is_nan, T.float32(0), T.Select(saturated, end, raw))
        return T.bind(T.cast(number, self.layout.row_dtype))


def kv_append(
    layout: KVLayout, num_heads: int, rotary_dim: int, sm_scale: float, dtype: str, limits: GpuLimits
) -> tirx.PrimFunc:
    """Build the kernel.

    Arguments of the kernel: :func:`kvq.schedules.cache_arguments.append_arguments`.
    """
    kv_heads, dim, page = layout.num_kv_heads, layout.head_dim, layout.page_size
    threads = min(_THREADS, limits.threads)
    at_once = max(1, _BATCH // dim)  # heads
    value_heads = min(at_once, kv_heads)
    query_groups = -(-num_heads // at_once)

    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        a = append_arguments(layout, num_heads, rotary_dim, dtype, "int32")
        num_open = T.cast(a.num_open, "int32")
        with launch([1 + query_groups, T.cast(a.n, "int32")], threads) as (part_of_row, row, thread):
            line = _Row(layout, rotary_dim, threads, thread, (row, a.qkv, a.rope))
            values = shared((value_heads * dim,), "float32")
            sums = shared((2, threads), "int32")
            count = local((2,), "int32")

            def store(value, head, part: int, channel):
                at = T.bind(T.shift_right(a.slots[row], page.bit_length() - 1))
                token = T.bind(T.bitwise_and(a.slots[row], page - 1))
                place = T.bind(token * dim + channel if part else channel * page + token)
                with T.If(at < num_open):
                    with T.Then():
                        put(a.kv_open, value, at, a.layer, head, part, place)
                    with T.Else():
                        put(a.workspace, value, at - num_open, head, part, place)

            def key(i):
                head, channel = line.split(i)
                store(line.clean(line.rotated(head + num_heads, channel), count), head, 0, channel)

            def some_values(first, heads: int):
                def load(i):
                    head, channel = line.split(i)
                    put(values, line.raw(first + head + (num_heads + kv_heads), channel), i)

                def write(i):
                    head, channel = line.split(i)
                    store(line.clean(T.bind(values[i]), count), first + head, 1, channel)

                for_threads(heads * dim, thread, threads, load)
                sync()
                if layout.v_bits is not None:
                    rotate(values, 0, heads * dim, dim, thread, threads)
                for_threads(heads * dim, thread, threads, write)
                sync()

            def keys_and_values():
                for i in range(2):
                    put(count, 0, i)
                for_threads(kv_heads * dim, thread, threads, key)
                with T.serial(kv_heads // value_heads) as turn:
                    some_values(turn * value_heads, value_heads)
                if rest := kv_heads % value_heads:
                    some_values(T.int32(kv_heads - rest), rest)
                for i in range(2):
                    put(sums, count[i], i, thread)
                reduce_lanes(add, sums, 2, thread, threads)
                when(thread < 2, lambda: put(a.faults, a.faults[row, thread] + sums[thread, 0], row, thread))

            def query(i):
                head, channel = line.split(i)
                head = T.bind(head + (part_of_row - 1) * at_once)

                def one():
                    put(a.q, line.rotated(head, channel) * T.float32(sm_scale), row, head, channel)

                when(head < num_heads, one)

            with T.If(part_of_row == 0):
                with T.Then():
                    keys_and_values()
                with T.Else():
                    for_threads(min(at_once, num_heads) * dim, thread, threads, query)
    return script.get()
