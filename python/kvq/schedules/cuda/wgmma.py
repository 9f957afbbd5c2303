"""``wgmma``: what four warps of an sm_90a multiply together, while they do other things.

``D[64, rows] += A[64, 16] B[16, rows]``: a warp of the group has A and D of 16 outputs in registers, as in
``mma.m16n8k16`` for every 8 rows. B lies in shared memory: rows of 128 bytes, swizzled as ``tile_copies.py``
says.
What runs reads its registers and B; they stay as they are until :func:`wgmma_wait`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script import tirx as T

from .mma import PTX_TYPES, emit

#: Descriptor of B, its address aside: 8 rows are 1,024 bytes, and the swizzle is that of 128 bytes.
SWIZZLED_ROWS = 1 << 62 | (1024 >> 4) << 32 | 1 << 16


def wgmma(acc, at: int, count: int, a: Sequence, b, dtype: str = "float16"):
    """Start ``acc[at : at + count] += A B``, ``b`` a descriptor; ``count`` is half the rows."""
    registers, kind = [acc[at + i] for i in range(count)], PTX_TYPES[dtype]
    name = f"wgmma.mma_async.sync.aligned.m64n{2 * count}k16.f32.{kind}.{kind}"
    emit(T.ptx[name](*registers, *a, b, T.bool(True), 1, 1, 0))


def wgmma_fence():
    """Make registers that were written what the next product reads."""
    emit(T.ptx["wgmma.fence.sync.aligned"]())


def wgmma_commit():
    """Close the group of products started so far."""
    emit(T.ptx["wgmma.commit_group.sync.aligned"]())


def wgmma_wait(pending: int):
    """Wait until at most ``pending`` groups run."""
    emit(T.ptx["wgmma.wait_group.sync.aligned"](pending))


def async_fence():
    """Show what this thread wrote to shared memory to the tensor cores."""
    emit(T.ptx["fence.proxy.async.shared::cta"]())
