"""Rows of a stored weight, as float32: the embeddings of tokens."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.schedules.statements import for_threads, put

from .block import ATTRIBUTES, launch
from .limits import GpuLimits
from .stored_weight import VECTOR, declare_weight

_THREADS = 64


def embedding(n_out: int, k: int, storage: str, limits: GpuLimits) -> tirx.PrimFunc:
    """Build the kernel that reads rows of a weight; ids outside the table give its first or last row.

    Arguments of the kernel: ids ``int32[n]``, the tensors of the weight, out ``float32[n, K]``.
    """
    threads = min(_THREADS, limits.threads)
    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        n = IRBuilder.name("n", T.int32())
        ids = builder.arg("ids", T.Buffer((n,), "int32"))
        weight = declare_weight(n_out, k, storage)
        out = builder.arg("out", T.Buffer((n, k), "float32"))
        with launch([n], threads) as (i, thread):
            row = T.bind(T.max(T.min(ids[i], n_out - 1), 0))

            def read(vector):
                for j, value in enumerate(weight.read(row, vector).values()):
                    put(out, value, i, vector * VECTOR + j)

            for_threads(k // VECTOR, thread, threads, read)
    return script.get()
