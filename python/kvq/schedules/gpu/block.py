"""Vocabulary of the portable kernels: a workgroup's threads, its loops, barriers and reductions.

Kernels are TIRx with explicit launches (:func:`launch`): that is what TVM's code generators of Metal, OpenCL
and WebGPU take, and kvq's own of SPIR-V. Nothing here needs subgroups; where a target has them
(:class:`~.limits.GpuLimits`), reductions may use them. Sums run in an order that depends on shapes and limits
alone.

A barrier must be met by all threads of a workgroup, and WGSL wants to see that: conditions and loop bounds
around one come from the workgroup's index, scalars and buffers that the kernel only reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tvm.script import tirx as T

from kvq.schedules.statements import put, run, when

#: Attributes of every kernel: arguments do not overlap, and no pass of Relax may fuse or schedule it.
ATTRIBUTES = {"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True}

#: Workgroups that every GPU starts along a dimension.
MOST_GROUPS = 65535

#: Loads that a thread starts before it waits for the first one, where nothing else hides their latency.
LOADS = 32

_ALL_LANES = 0xFFFFFFFF


@contextmanager
def launch(blocks: Sequence, threads: int) -> Iterator[tuple]:
    """Start a grid of workgroups, inside an ``IRBuilder``: ``with launch([m, n], 128) as (x, y, thread):``.

    Parameters
    ----------
    blocks : sequence of int or int32 expressions
        Up to three extents, x first.
    threads : int
        Threads of a workgroup.

    Yields
    ------
    tuple
        The workgroup's index along each extent, then the thread's.
    """
    with ExitStack() as stack:
        tags = [f"blockIdx.{axis}" for axis in "xyz"[: len(blocks)]]
        extents = [*zip(tags, blocks, strict=True), ("threadIdx.x", threads)]
        yield tuple(stack.enter_context(T.launch_thread(tag, extent)) for tag, extent in extents)


@contextmanager
def launch_many(count, threads: int) -> Iterator[tuple]:
    """Start ``count`` workgroups, however many: ``with launch_many(n, 128) as (index, thread):``.

    The last ones may do the last index over again: each must write what the others of its index do.
    """
    blocks = [T.min(count, MOST_GROUPS), T.truncdiv(count + (MOST_GROUPS - 1), MOST_GROUPS)]
    with launch(blocks, threads) as (x, y, thread):
        yield T.bind(T.min(y * MOST_GROUPS + x, count - 1)), thread


def sync():
    """Wait for all threads of the workgroup, and see what they wrote to shared memory."""
    T.evaluate(T.tvm_storage_sync("shared"))


def shared(shape: tuple[int, ...], dtype: str):
    """Memory of the workgroup."""
    return T.alloc_buffer(shape, dtype, scope="shared")


def local(shape: tuple[int, ...], dtype: str):
    """Registers of the thread; the indices must be static after unrolling, for the sake of speed."""
    return T.alloc_buffer(shape, dtype, scope="local")


def held(value, dtype: str = "int32"):
    """A value kept in a register: where an integer is used, passes would put the whole expression instead."""
    register = local((1,), dtype)
    put(register, value, 0)
    return T.bind(register[0])


def either(condition, body, otherwise) -> None:
    """Emit ``body()`` under a condition, else ``otherwise()``."""
    with T.If(condition):
        with T.Then():
            body()
        with T.Else():
            otherwise()


def load_run(buffer, start, count: int) -> list:
    """``count`` (1, 2 or 4) numbers side by side, by one load; ``start`` is a multiple of the count."""
    if count == 1:
        return [T.bind(buffer[start])]
    loaded = T.bind(buffer[run(start, count)])
    return [T.Shuffle([loaded], [i]) for i in range(count)]


def add(a, b):
    """The sum, to reduce with."""
    return a + b


def reduce_lanes(combine, scratch, count: int, thread, lanes: int, subgroup: int = 0):
    """Combine each of ``scratch[count, threads]`` over ``lanes`` neighbouring threads, a power of two.

    The first of the lanes then finds the result in its own place. Each thread has written its place itself.
    Lanes of a subgroup (``limits.subgroup``, a power of two) exchange registers. Ends with a barrier.
    """
    together = max(min(lanes, subgroup), 1)
    if together > 1:
        for i in range(count):
            value, half = T.bind(scratch[i, thread]), together // 2
            while half:
                other = T.tvm_warp_shuffle_down(T.uint32(_ALL_LANES), value, half, subgroup, subgroup)
                value, half = T.bind(combine(value, other)), half // 2
            put(scratch, value, i, thread)
    sync()
    lane, half = T.bind(T.bitwise_and(thread, lanes - 1)), lanes // 2
    while half >= together:

        def fold(half=half):
            for i in range(count):
                put(scratch, combine(scratch[i, thread], scratch[i, thread + half]), i, thread)

        when(lane < half, fold)
        sync()
        half //= 2
