"""Vocabulary of the plain CUDA kernels: loops over a block's threads, warp and block reductions.

Kernels are TIRx: plain Python functions emit statements inside a ``T.prim_func`` that says how many blocks
there are. Sums run in an order that depends on shapes alone, so a row has the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T

from kvq.schedules.statements import put, when

WARP = 32
#: Attributes of every kernel: arguments do not overlap, and no pass of Relax may fuse or schedule it.
ATTRIBUTES = {"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True}

_ALL_LANES = 0xFFFFFFFF


#: From here on, a kernel may start while the one before it runs.
OVERLAP_FROM = 90


def arch_number(arch: str) -> int:
    """The number of an architecture such as ``sm_90a``."""
    return int("".join(filter(str.isdigit, arch)))


def overlaps(archs: Sequence[str]) -> bool:
    """Whether on GPUs of every one of ``archs`` a kernel may start while the one before it runs."""
    return min(map(arch_number, archs)) >= OVERLAP_FROM


def kernel_attributes(overlap: bool) -> dict[str, Any]:
    """Attributes of a kernel; one with ``overlap`` calls :func:`wait_for_rows` before it reads or writes."""
    if not overlap:
        return ATTRIBUTES
    return {**ATTRIBUTES, "tirx.kernel_launch_params": ["tirx.use_programtic_dependent_launch"]}


def let_next_start(overlap: bool) -> None:
    """Let the kernel behind this one start, as far as it does not depend on this one."""
    if overlap:
        T.evaluate(T.ptx["griddepcontrol.launch_dependents"]())


def wait_for_rows(overlap: bool) -> None:
    """Wait for the end of the kernel before this one."""
    if overlap:
        T.evaluate(T.ptx["griddepcontrol.wait"]())


def sync():
    """Wait for all threads of the block."""
    T.evaluate(T.cuda.cta_sync())


def reduce_warp(combine, value, width: int = WARP):
    """Combine ``value`` over ``width`` neighbouring lanes; every lane has the result."""
    mask = width // 2
    while mask:
        other = T.tvm_warp_shuffle_xor(T.uint32(_ALL_LANES), value, mask, WARP, WARP)
        value = T.bind(combine(value, other))
        mask //= 2
    return value


def reduce_block(combine, value, thread, threads: int, shared):
    """Combine ``value`` over the block through ``shared[threads / 32]``; every thread has the result."""
    value = reduce_warp(combine, value)
    when(T.bitwise_and(thread, WARP - 1) == 0, lambda: put(shared, value, T.shift_right(thread, 5)))
    sync()
    total = shared[0]
    for warp in range(1, threads // WARP):
        total = combine(total, shared[warp])
    return T.bind(total)


def add(a, b):
    """The sum, to reduce with."""
    return a + b


def libm(name: str, x):
    """A function of CUDA's accurate float32 library; TVM's own lowering takes the fast, inexact ones."""
    return T.call_extern("float32", name, x)


def positive_zero(x):
    """``x + 0``, spelled so that no simplification drops it: the sign of a zero does not survive."""
    return T.call_extern("float32", "__fadd_rn", x, T.float32(0))
