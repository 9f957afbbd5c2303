"""The second launch of attention: rows that were split into several tasks.

A workgroup has one row and query head. It weighs the splits by their maxima, as many at a time as it has
threads, adds them up in order, slices of them side by side, then undoes the rotation of V.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.layout import KVLayout
from kvq.schedules.cache_arguments import AttentionArguments
from kvq.schedules.statements import for_threads, put, when

from .attention_tile import MERGE_THREADS
from .block import add, launch, local, reduce_lanes, shared, sync
from .hadamard import rotate


def merge_rows(a: AttentionArguments, layout: KVLayout, num_heads: int, dtype: str) -> None:
    """Emit the launch."""
    dim = layout.head_dim
    slices = MERGE_THREADS // dim

    with launch([num_heads, T.cast(a.merges.shape[0], "int32")], MERGE_THREADS) as (head, at, thread):
        weights, sums = shared((MERGE_THREADS,), "float32"), shared((slices * dim,), "float32")
        lanes = shared((1, MERGE_THREADS), "float32")
        peak, state = local((1,), "float32"), local((2,), "float32")
        channel, part = T.bind(T.truncmod(thread, dim)), T.bind(T.truncdiv(thread, dim))

        def merge():
            row, slot, count = (T.bind(a.merges[at, i]) for i in range(3))
            put(peak, a.scratch[slot, head, dim], 0)
            with T.serial(T.truncdiv(count + (MERGE_THREADS - 1), MERGE_THREADS)) as turn:
                index = T.bind(T.min(turn * MERGE_THREADS + thread, count - 1))
                put(peak, T.max(peak[0], a.scratch[slot + index, head, dim]), 0)
            put(lanes, peak[0], 0, thread)
            reduce_lanes(T.max, lanes, 1, thread, MERGE_THREADS)
            most = lanes[0, 0]
            if a.sinks is not None:
                most = T.max(most, a.sinks[head])
            most = T.bind(most)
            put(state, T.float32(0), 0)  # a channel's sum over the thread's slice of the splits
            put(state, T.float32(0), 1)  # the weights of the splits of the thread
            with T.serial(T.truncdiv(count + (MERGE_THREADS - 1), MERGE_THREADS)) as turn:
                first = T.bind(turn * MERGE_THREADS)
                here = T.bind(T.min(count - first, MERGE_THREADS))

                def weigh():
                    place = T.bind(slot + first + thread)
                    weight = T.bind(T.exp(a.scratch[place, head, dim] - most))
                    put(weights, weight, thread)
                    put(state, state[1] + weight * a.scratch[place, head, dim + 1], 1)

                def add_splits():
                    with T.serial(T.truncdiv(here - part + (slices - 1), slices)) as step:
                        index = T.bind(step * slices + part)
                        value = a.scratch[slot + first + index, head, channel]
                        put(state, state[0] + weights[index] * value, 0)

                sync()
                when(thread < here, weigh)
                sync()
                when(part < slices, add_splits)
            sync()
            put(lanes, state[1], 0, thread)
            when(part < slices, lambda: put(sums, state[0], thread))
            reduce_lanes(add, lanes, 1, thread, MERGE_THREADS)
            total = lanes[0, 0]
            if a.sinks is not None:
                total = total + T.exp(a.sinks[head] - most)
            factor = T.bind(T.float32(1) / total)

            def divide(c):
                value = T.float32(0)
                for s in range(slices):
                    value = T.bind(value + sums[s * dim + c])
                put(sums, value * factor, c)

            for_threads(dim, thread, MERGE_THREADS, divide)
            sync()
            if layout.v_bits is not None:
                rotate(sums, 0, dim, dim, thread, MERGE_THREADS)
            for_threads(
                dim, thread, MERGE_THREADS, lambda c: put(a.out, T.cast(sums[c], dtype), row, head, c)
            )

        when(at < a.counts[3], merge)
