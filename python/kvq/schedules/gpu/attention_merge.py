"""The second launch of attention: rows that were split into several tasks.

A workgroup has one row and query head. Its slices of 32 threads share the splits out, each with a running
maximum of its own, a few splits at a time so that their loads overlap. Then the slices are added up in order,
and the rotation of V is undone.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.layout import KVLayout
from kvq.schedules.cache_arguments import AttentionArguments
from kvq.schedules.statements import for_threads, put, when

from .attention_tile import MERGE_THREADS
from .block import held, launch, local, shared, sync
from .hadamard import rotate
from .page_softmax import MASKED

#: Threads of a slice, and splits that it takes at a time.
_LANES, _TOGETHER = 32, 4
_SLICES = MERGE_THREADS // _LANES


def merge_rows(a: AttentionArguments, layout: KVLayout, num_heads: int, dtype: str) -> None:
    """Emit the launch."""
    dim = layout.head_dim
    channels = -(-dim // _LANES)

    with launch([num_heads, T.cast(a.merges.shape[0], "int32")], MERGE_THREADS) as (head, at, thread):
        sums, numbers = shared((_SLICES * dim,), "float32"), shared((2, _SLICES), "float32")
        peak, total, own = (local((n,), "float32") for n in (1, 1, channels))
        lane, part = held(T.bitwise_and(thread, _LANES - 1)), held(T.truncdiv(thread, _LANES))

        def merge():
            row, slot, count = (T.bind(a.merges[at, i]) for i in range(3))

            def some(step):
                """Add splits ``_TOGETHER * step ...`` of the slice's; those beyond the last weigh nothing."""
                found = []
                for i in range(_TOGETHER):
                    index = held((step * _TOGETHER + i) * _SLICES + part)
                    place = held(slot + T.min(index, count - 1))
                    values = [
                        T.bind(a.scratch[place, head, T.min(lane + k * _LANES, dim - 1)])
                        for k in range(channels)
                    ]
                    most = T.Select(index < count, a.scratch[place, head, dim], T.float32(MASKED))
                    weight = T.Select(index < count, a.scratch[place, head, dim + 1], T.float32(0))
                    found.append((index, T.bind(most), T.bind(weight), values))
                now = peak[0]
                for _, most, _, _ in found:
                    now = held(T.max(now, most), "float32")
                fade = T.bind(T.exp(peak[0] - now))
                put(peak, now, 0)
                put(total, total[0] * fade, 0)
                for k in range(channels):
                    put(own, own[k] * fade, k)
                for index, most, weight, values in found:
                    factor = T.bind(T.Select(index < count, T.exp(most - now), T.float32(0)))
                    put(total, total[0] + factor * weight, 0)
                    for k, value in enumerate(values):
                        put(own, own[k] + factor * value, k)

            put(peak, T.float32(MASKED), 0)
            put(total, T.float32(0), 0)
            for k in range(channels):
                put(own, T.float32(0), k)
            turns = T.truncdiv(count + (_SLICES * _TOGETHER - 1), _SLICES * _TOGETHER)
            with T.serial(held(turns)) as step:
                some(step)
            for k in range(channels):
                channel = held(lane + k * _LANES)
                when(channel < dim, lambda k=k, channel=channel: put(sums, own[k], part * dim + channel))

            def tell():
                put(numbers, peak[0], 0, part)
                put(numbers, total[0], 1, part)

            when(lane == 0, tell)
            sync()
            most = numbers[0, 0]
            for s in range(1, _SLICES):
                most = held(T.max(most, numbers[0, s]), "float32")
            if a.sinks is not None:
                most = held(T.max(most, a.sinks[head]), "float32")
            factors = [T.bind(T.exp(numbers[0, s] - most)) for s in range(_SLICES)]
            every = T.float32(0) if a.sinks is None else T.exp(a.sinks[head] - most)
            for s, factor in enumerate(factors):
                every = T.bind(every + factor * numbers[1, s])
            scale = T.bind(T.float32(1) / every)

            def divide(c):
                value = T.float32(0)
                for s, factor in enumerate(factors):
                    value = T.bind(value + factor * sums[s * dim + c])
                put(sums, value * scale, c)

            for_threads(dim, thread, MERGE_THREADS, divide)
            sync()
            if layout.v_bits is not None:
                rotate(sums, 0, dim, dim, thread, MERGE_THREADS)
            for_threads(
                dim, thread, MERGE_THREADS, lambda c: put(a.out, T.cast(sums[c], dtype), row, head, c)
            )

        when(at < a.counts[3], merge)
