"""Weights as the kernels read them: in blocks of 16 output rows, so that rows sit in lanes.

``int4``      codes ``uint32[N/16, K/32, 4, 16]``: byte ``b`` of word ``w`` holds input ``4w + b`` of a group
              in its low half and input ``16 + 4w + b`` in its high half; scales ``float16[N/16, K/32, 16]``.
``float``     ``[N/16, K, 16]`` in the stored dtype.

The last block is padded with zeros where N is no multiple of 16. The ``prepare_*`` kernels bring stored
tensors into this layout, once, when a model is loaded; ``embedding`` reads single rows of it.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from .vector import CpuIsa, for_blocks, for_rows, put

#: Output rows of a block of weights.
BLOCK = 16
#: Inputs that share one weight scale, and one activation scale.
GROUP = 32
#: Zero point of the int4 weight codes.
ZERO = 7


def num_blocks(n: int) -> int:
    """Blocks of 16 output rows."""
    return -(-n // BLOCK)


def prepare_int4_codes(n_out: int, k: int) -> tirx.PrimFunc:
    """Build the kernel from stored codes ``uint32[N, K/8]`` (code j of word i = input 8i + j) to blocks."""
    blocks, groups = num_blocks(n_out), k // GROUP

    def block_codes(block, raw, out):
        with T.serial(groups) as g, T.serial(4) as word, T.serial(BLOCK) as lane:
            row = T.bind(block * BLOCK + lane)
            stored = T.bind(T.min(row, n_out - 1))
            packed = T.uint32(0)
            for half in range(2):
                source = raw[stored, g * 4 + half * 2 + T.truncdiv(word, 2)]
                for byte in range(4):
                    shift = T.cast(T.truncmod(word, 2) * 16 + byte * 4, "uint32")
                    code = T.bitwise_and(T.shift_right(source, shift), T.uint32(15))
                    packed = T.bitwise_or(packed, T.shift_left(code, T.uint32(8 * byte + 4 * half)))
            put(out, T.Select(row < n_out, packed, T.uint32(0)), block, g, word, lane)

    @T.prim_func(s_tir=True, private=True)
    def prepare_int4_codes(
        raw: T.Buffer((n_out, k // 8), "uint32"), out: T.Buffer((blocks, groups, 4, BLOCK), "uint32")
    ):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        for_blocks(blocks, block_codes, raw, out)

    return prepare_int4_codes


def prepare_blocks(n_out: int, columns: int, dtype: str) -> tirx.PrimFunc:
    """Build the kernel from a stored matrix ``[N, columns]`` to ``[N/16, columns, 16]``, zero padded."""
    blocks = num_blocks(n_out)

    def block_columns(block, raw, out):
        with T.serial(columns) as column, T.serial(BLOCK) as lane:
            row = T.bind(block * BLOCK + lane)
            value = raw[T.min(row, n_out - 1), column]
            put(out, T.Select(row < n_out, value, T.cast(0, dtype)), block, column, lane)

    @T.prim_func(s_tir=True, private=True)
    def prepare_blocks(
        raw: T.Buffer((n_out, columns), dtype), out: T.Buffer((blocks, columns, BLOCK), dtype)
    ):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        for_blocks(blocks, block_columns, raw, out)

    return prepare_blocks


def prepare_vector(n: int, dtype: str) -> tirx.PrimFunc:
    """Build the kernel from a stored vector ``dtype[n]`` to float32."""

    @T.prim_func(s_tir=True, private=True)
    def prepare_vector(raw: T.Buffer((n,), dtype), out: T.Buffer((n,), "float32")):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        for i in T.serial(n):
            with T.sblock("element"):
                vi = T.axis.spatial(n, i)
                T.reads()
                T.writes()
                out[vi] = T.cast(raw[vi], "float32")

    return prepare_vector


def embedding(n_out: int, k: int, dtype: str, isa: CpuIsa) -> tirx.PrimFunc:
    """Build the kernel that reads rows of a weight in block layout, as float32.

    Arguments of the kernel: ids ``int32[n]``, the tensors of the weight, out ``float32[n, K]``.
    """
    blocks, groups = num_blocks(n_out), k // GROUP

    def where(ids, i):
        row = T.bind(T.max(T.min(T.cast(ids[i], "int64"), T.int64(n_out - 1)), T.int64(0)))
        return T.bind(T.truncdiv(row, T.int64(BLOCK))), T.bind(T.truncmod(row, T.int64(BLOCK)))

    def int4_row(i, ids, w, s, out):
        block, lane = where(ids, i)
        with T.serial(groups) as g, T.serial(4) as word:
            scale = T.bind(T.cast(s[block, g, lane], "float32"))
            packed = T.bind(w[block, g, word, lane])
            for half in range(2):
                for byte in range(4):
                    code = T.bitwise_and(T.shift_right(packed, T.uint32(8 * byte + 4 * half)), T.uint32(15))
                    value = T.cast(T.cast(code, "int32") - ZERO, "float32") * scale
                    put(out, value, i, g * GROUP + half * 16 + word * 4 + byte)

    def float_row(i, ids, w, out):
        block, lane = where(ids, i)
        with T.serial(k) as j:
            put(out, T.cast(w[block, j, lane], "float32"), i, j)

    if dtype == "int4":

        @T.prim_func(s_tir=True, private=True)
        def embedding_int4(
            ids_h: T.handle,
            w: T.Buffer((blocks, groups, 4, BLOCK), "uint32"),
            s: T.Buffer((blocks, groups, BLOCK), "float16"),
            out_h: T.handle,
        ):
            T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
            n = T.int64()
            ids = T.match_buffer(ids_h, (n,), "int32")
            out = T.match_buffer(out_h, (n, k), "float32")
            for_rows(n, int4_row, ids, w, s, out)

        return embedding_int4

    @T.prim_func(s_tir=True, private=True)
    def embedding_float(ids_h: T.handle, w: T.Buffer((blocks, k, BLOCK), dtype), out_h: T.handle):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        n = T.int64()
        ids = T.match_buffer(ids_h, (n,), "int32")
        out = T.match_buffer(out_h, (n, k), "float32")
        for_rows(n, float_row, ids, w, out)

    return embedding_float
