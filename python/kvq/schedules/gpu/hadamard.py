"""The rotation of values: a block-diagonal Hadamard transform, in shared memory."""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.schedules.statements import for_threads, put

from .block import local, sync

#: Butterflies of two that a thread does at once: their numbers stay in its registers.
_STAGES = 3


def rotate(rows, start, count: int, dim: int, thread, threads: int) -> None:
    """Multiply rows by the orthonormal matrix of :func:`kvq.quantization.kv_codec.hadamard`.

    ``count`` numbers of the shared buffer ``rows`` (float32, one dimension) from ``start`` on: whole rows of
    ``dim``. They must be there, behind a barrier; another stands behind the result.
    """
    block = dim & -dim
    stages, stride = block.bit_length() - 1, 1
    factor = float(block) ** -0.5
    while stages:
        done = min(stages, _STAGES)
        _butterflies(rows, start, count, stride, 1 << done, factor, thread, threads)
        sync()
        stages, stride, factor = stages - done, stride << done, 1.0


def _butterflies(rows, start, count: int, stride: int, size: int, factor: float, thread, threads: int):
    """Transforms of ``size`` numbers, ``stride`` apart."""

    def one(item):
        low = T.bind(T.bitwise_and(item, stride - 1))
        first = T.bind(start + (item - low) * size + low)
        x = local((size,), "float32")
        for i in range(size):
            value = rows[first + i * stride]
            put(x, value * T.float32(factor) if factor != 1 else value, i)
        step = 1
        while step < size:
            for i in (i for i in range(size) if not i & step):
                a, b = T.bind(x[i]), T.bind(x[i + step])
                put(x, a + b, i)
                put(x, a - b, i + step)
            step *= 2
        for i in range(size):
            put(rows, x[i], first + i * stride)

    for_threads(count // size, thread, threads, one)
