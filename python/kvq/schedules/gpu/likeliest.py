"""The likeliest token of each row of logits, so that greedy decoding copies one number a row to the host."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.schedules.statements import for_threads, put, when

from .block import ATTRIBUTES, launch, local, shared, sync
from .limits import GpuLimits

#: What stands for a row with a logit that is not finite.
NOT_FINITE = -1

_THREADS = 256
_EXPONENT = 0x7F800000


def likeliest(vocab: int, drawable: int, limits: GpuLimits) -> tirx.PrimFunc:
    """Build the kernel: a workgroup a row; of equal logits the first counts, as in ``numpy.argmax``.

    Arguments of the kernel: logits ``float32[n, vocab]`` and out ``int32[n]``: an id below ``drawable``, or
    :data:`NOT_FINITE`.
    """
    threads = min(_THREADS, limits.threads)
    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        n = IRBuilder.name("n", T.int32())
        logits = builder.arg("logits", T.Buffer((n, vocab), "float32"))
        out = builder.arg("out", T.Buffer((n,), "int32"))
        with launch([n], threads) as (row, thread):
            best, at = local((1,), "float32"), local((2,), "int32")  # the id, and whether one is not finite
            values, places = shared((threads,), "float32"), shared((2, threads), "int32")
            put(best, T.float32(-3.4028234663852886e38), 0)
            put(at, T.int32(vocab), 0)
            put(at, T.int32(0), 1)

            def take(value, index):
                better = T.Or(value > best[0], T.And(value == best[0], index < at[0]))

                def replace():
                    put(best, value, 0)
                    put(at, index, 0)

                when(better, replace)

            def look(index):
                value = T.bind(logits[row, index])
                # by its bits, for a compiler may assume that there is no NaN
                exponent = T.bitwise_and(T.reinterpret("int32", value), T.int32(_EXPONENT))
                put(at, T.bitwise_or(at[1], T.cast(exponent == T.int32(_EXPONENT), "int32")), 1)
                take(value, index)

            for_threads(drawable, thread, threads, look)
            half = threads // 2
            while half:
                put(values, best[0], thread)
                for i in range(2):
                    put(places, at[i], i, thread)
                sync()

                def fold(half=half):
                    put(at, T.bitwise_or(at[1], places[1, thread + half]), 1)
                    take(T.bind(values[thread + half]), T.bind(places[0, thread + half]))

                when(thread < half, fold)
                sync()
                half //= 2
            when(thread == 0, lambda: put(out, T.Select(at[1] == 0, at[0], T.int32(NOT_FINITE)), row))
    return script.get()
