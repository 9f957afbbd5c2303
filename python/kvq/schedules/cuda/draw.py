"""Draws a token from each row of logits, so that a step copies one number a row to the host.

A block a row. The draw is :func:`kvq.runtime.sampler.draw`, without a sort: the likeliest id is found, then
what is kept (``draw_limit.py``), then the id (``draw_walk.py``).
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from kvq.runtime.sampler import DRAW_FIELDS
from kvq.schedules.statements import put, when

from .block import ATTRIBUTES, WARP, sync
from .draw_limit import find_limit
from .draw_row import ALL_LANES, THREADS, WARPS, Row
from .draw_walk import draw_id

#: What stands for a row with a logit that is not finite.
NOT_FINITE = -1
_INFINITE = 0x7F800000


def draw(vocab: int, drawable: int) -> tirx.PrimFunc:
    """Build the kernel.

    Arguments of the kernel: logits ``float32[n, vocab]``, draws ``int32[n, DRAW_FIELDS]``, out ``int32[n]``.
    That is an id below ``drawable``, or :data:`NOT_FINITE`. Of equal logits the first is the likeliest.
    """

    @T.prim_func(private=True)
    def draw(logits_h: T.handle, draws_h: T.handle, out_h: T.handle):
        T.func_attr(ATTRIBUTES)
        n = T.int64()
        logits = T.match_buffer(logits_h, (n, vocab), "float32")
        draws = T.match_buffer(draws_h, (n, DRAW_FIELDS), "int32")
        out = T.match_buffer(out_h, (n,), "int32")
        T.device_entry()
        row = T.cta_id([T.cast(n, "int32")])
        thread = T.thread_id([THREADS])
        _draw_row(Row(logits, draws, row, thread, vocab, drawable), out)

    return draw


def _draw_row(row: Row, out: Any) -> None:
    """All of it, for one row."""
    largest, place, bad = _likeliest(row)
    row.weigh(largest, T.bind(T.reinterpret("float32", row.fields[0])))
    done = T.Or(bad != 0, row.temperature == T.float32(0))
    with T.If(done):
        with T.Then():
            when(
                row.thread == 0,
                lambda: put(out, T.Select(bad == 0, place, T.int32(NOT_FINITE)), row.row),
            )
        with T.Else():
            find_limit(row)
            draw_id(row, out)


def _likeliest(row: Row) -> tuple[Any, Any, Any]:
    """The largest logit, its first id, and whether a logit is not finite."""
    best = T.alloc_local((1,), "float32")
    at = T.alloc_local((2,), "int32")
    values = T.alloc_shared((WARPS,), "float32")
    ids = T.alloc_shared((2, WARPS), "int32")
    put(best, T.float32("-inf"), 0)
    put(at, T.int32(row.vocab), 0)
    put(at, T.int32(0), 1)

    def take(value, index):
        better = T.Or(value > best[0], T.And(value == best[0], index < at[0]))
        with T.If(better), T.Then():
            put(best, value, 0)
            put(at, index, 0)

    def combine():
        mask = WARP // 2
        while mask:
            value = T.bind(T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), best[0], mask, WARP, WARP))
            index = T.bind(T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), at[0], mask, WARP, WARP))
            bad = T.bind(T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), at[1], mask, WARP, WARP))
            put(at, T.bitwise_or(at[1], bad), 1)
            take(value, index)
            mask //= 2

    def look(index, value):
        # by its bits: an exponent of all ones is infinity or NaN
        exponent = T.bitwise_and(T.reinterpret("int32", value), T.int32(_INFINITE))
        put(at, T.bitwise_or(at[1], T.cast(exponent == T.int32(_INFINITE), "int32")), 1)
        take(value, index)

    row.each_id(look)
    combine()

    def share():
        put(values, best[0], row.warp)
        for i in range(2):
            put(ids, at[i], i, row.warp)

    when(row.lane == 0, share)
    sync()
    put(best, values[row.lane], 0)
    for i in range(2):
        put(at, ids[i, row.lane], i)
    combine()
    return T.bind(best[0]), T.bind(at[0]), T.bind(at[1])
