"""The likeliest token of each row of logits, so that greedy decoding copies one number a row to the host."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from .block import ATTRIBUTES, WARP, for_threads, put, sync, when

THREADS = 1024
#: What stands for a row with a logit that is not finite.
NOT_FINITE = -1

_ALL_LANES = 0xFFFFFFFF


def likeliest(vocab: int, drawable: int) -> tirx.PrimFunc:
    """Build the kernel: a block a row; of equal logits the first counts, as in ``numpy.argmax``.

    Arguments of the kernel: logits ``float32[n, vocab]`` and out ``int32[n]``: an id below ``drawable``, or
    :data:`NOT_FINITE`.
    """

    def better(value, index, other, other_index):
        return T.Or(other > value, T.And(other == value, other_index < index))

    def row_best(row, thread, logits, out):
        best = T.alloc_local((1,), "float32")
        at = T.alloc_local((2,), "int32")  # the id, and whether a logit is not finite
        values = T.alloc_shared((THREADS // WARP,), "float32")
        places = T.alloc_shared((2, THREADS // WARP), "int32")
        put(best, T.float32("-inf"), 0)
        put(at, T.int32(vocab), 0)
        put(at, T.int32(0), 1)

        def take(value, index):
            with T.If(better(best[0], at[0], value, index)), T.Then():
                put(best, value, 0)
                put(at, index, 0)

        def combine(width):
            mask = width // 2
            while mask:
                value = T.bind(T.tvm_warp_shuffle_xor(T.uint32(_ALL_LANES), best[0], mask, WARP, WARP))
                index = T.bind(T.tvm_warp_shuffle_xor(T.uint32(_ALL_LANES), at[0], mask, WARP, WARP))
                bad = T.bind(T.tvm_warp_shuffle_xor(T.uint32(_ALL_LANES), at[1], mask, WARP, WARP))
                put(at, T.bitwise_or(at[1], bad), 1)
                take(value, index)
                mask //= 2

        def look(index):
            value = T.bind(logits[row, index])
            # by its bits: an exponent of all ones is infinity or NaN
            exponent = T.bitwise_and(T.reinterpret("int32", value), T.int32(0x7F800000))
            put(at, T.bitwise_or(at[1], T.cast(exponent == T.int32(0x7F800000), "int32")), 1)
            take(value, index)

        for_threads(drawable, thread, THREADS, look)
        combine(WARP)
        warp, lane = T.bind(T.shift_right(thread, 5)), T.bind(T.bitwise_and(thread, WARP - 1))

        def share():
            put(values, best[0], warp)
            for i in range(2):
                put(places, at[i], i, warp)

        when(lane == 0, share)
        sync()
        put(best, values[lane], 0)
        for i in range(2):
            put(at, places[i, lane], i)
        combine(WARP)
        when(thread == 0, lambda: put(out, T.Select(at[1] == 0, at[0], T.int32(NOT_FINITE)), row))

    @T.prim_func(private=True)
    def likeliest(logits_h: T.handle, out_h: T.handle):
        T.func_attr(ATTRIBUTES)
        n = T.int64()
        logits = T.match_buffer(logits_h, (n, vocab), "float32")
        out = T.match_buffer(out_h, (n,), "int32")
        T.device_entry()
        row = T.cta_id([T.cast(n, "int32")])
        thread = T.thread_id([THREADS])
        row_best(row, thread, logits, out)

    return likeliest
