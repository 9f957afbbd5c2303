"""Rows of a weight in block layout, as float32: the embeddings of tokens."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from kvq.schedules.statements import put

from .vector import for_rows
from .weight_blocks import BLOCK, WeightBlocks

_ATTRIBUTES = {"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True}


def embedding(n_out: int, k: int, storage: str) -> tirx.PrimFunc:
    """Build the kernel that reads rows of a weight; ids outside the table give its first or last row.

    Arguments of the kernel: ids ``int32[n]``, the tensors of the weight (``weight_blocks.py``), out
    ``float32[n, K]``.
    """
    blocks = WeightBlocks(n_out, k, storage)
    kind, codes, scales = blocks.kind, blocks.code_shape, blocks.scale_shape

    def read(i, ids, weights, out):
        row = T.bind(T.max(T.min(T.cast(ids[i], "int64"), T.int64(n_out - 1)), T.int64(0)))
        block, lane = T.bind(T.truncdiv(row, T.int64(BLOCK))), T.bind(T.truncmod(row, T.int64(BLOCK)))
        blocks.row_to_float(weights, block, lane, k, lambda j, value: put(out, value, i, j))

    if kind.bits is None:

        @T.prim_func(s_tir=True, private=True)
        def embedding_float(ids_h: T.handle, w: T.Buffer(blocks.float_shape, storage), out_h: T.handle):
            T.func_attr(_ATTRIBUTES)
            n = T.int64()
            ids = T.match_buffer(ids_h, (n,), "int32")
            out = T.match_buffer(out_h, (n, k), "float32")
            for_rows(n, read, ids, (w,), out)

        return embedding_float

    if kind.offset is None:

        @T.prim_func(s_tir=True, private=True)
        def embedding_codes(
            ids_h: T.handle, w: T.Buffer(codes, "uint32"), s: T.Buffer(scales, "float16"), out_h: T.handle
        ):
            T.func_attr(_ATTRIBUTES)
            n = T.int64()
            ids = T.match_buffer(ids_h, (n,), "int32")
            out = T.match_buffer(out_h, (n, k), "float32")
            for_rows(n, read, ids, (w, s), out)

        return embedding_codes

    @T.prim_func(s_tir=True, private=True)
    def embedding_offset(
        ids_h: T.handle,
        w: T.Buffer(codes, "uint32"),
        s: T.Buffer(scales, "float16"),
        z: T.Buffer(scales, "float16"),
        out_h: T.handle,
    ):
        T.func_attr(_ATTRIBUTES)
        n = T.int64()
        ids = T.match_buffer(ids_h, (n,), "int32")
        out = T.match_buffer(out_h, (n, k), "float32")
        for_rows(n, read, ids, (w, s, z), out)

    return embedding_offset
