"""Weights as the kernels read them: in blocks of 16 output rows, so that rows sit in lanes.

``int4*``     codes ``uint32[N/16, K/32, 4, 16]``: byte ``b`` of word ``w`` holds input ``4w + b`` of 32
              in its low half and input ``16 + 4w + b`` in its high half.
``int8*``     codes ``uint32[N/16, K/4, 16]``: byte ``b`` of word ``w`` holds input ``4w + b``.
both          scales and offsets ``float16[N/16, K/group, 16]``.
floats        ``[N/16, K, 16]`` in the stored dtype.

The last block is padded with zeros where N is no multiple of 16. The ``prepare_*`` kernels bring stored
tensors into this layout, once, when a model is loaded; :class:`WeightBlocks` reads it.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from kvq.quantization.storage import GROUP, STORAGES
from kvq.schedules.statements import put, run

from .vector import CpuIsa, for_blocks, splat

#: Output rows of a block of weights.
BLOCK = 16
#: 32-bit words of codes that meet 16 activations: a half of a group of 32.
HALF = 4


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
        # one loop: two of constant lengths LLVM unrolls, which takes it a second for each shape
        with T.serial(columns * BLOCK) as i:
            column, lane = T.bind(T.truncdiv(i, BLOCK)), T.bind(T.truncmod(i, BLOCK))
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


class WeightBlocks:
    """One weight in blocks: shapes of its tensors, and what reads them.

    Tensors are passed as one tuple: the weight, or codes, scales and, where the storage has one, offsets.

    Parameters
    ----------
    n_out, k : int
        Outputs and inputs.
    storage : str
        A key of :data:`~kvq.quantization.storage.STORAGES`.
    """

    def __init__(self, n_out: int, k: int, storage: str) -> None:
        self.kind, blocks = STORAGES[storage], num_blocks(n_out)
        kind = self.kind
        self.float_shape = (blocks, k, BLOCK)
        self.code_shape = (blocks, k // GROUP, HALF, BLOCK) if kind.bits == 4 else (blocks, k // 4, BLOCK)
        self.scale_shape = (blocks, k // kind.group, BLOCK)

    def words(self, codes, block, g, at, lanes: int) -> list:
        """Codes of group ``g`` as eight uint32 vectors: byte ``b`` of number ``j`` is input ``4j + b``."""
        if self.kind.bits == 8:
            return [T.bind(codes[block, g * (2 * HALF) + j, at]) for j in range(2 * HALF)]
        stored = [T.bind(codes[block, g, j, at]) for j in range(HALF)]
        mask = splat(T.uint32(0x0F0F0F0F), lanes)
        low = [T.bind(T.bitwise_and(word, mask)) for word in stored]
        shifted = [T.shift_right(word, splat(T.uint32(4), lanes)) for word in stored]
        return low + [T.bind(T.bitwise_and(word, mask)) for word in shifted]

    def scales(self, weights, block, g, at, lanes: int) -> list[tuple]:
        """Scale and minimum (None if there is none) of each part of a group of 32, as float32 vectors."""
        out = []
        for part in range(GROUP // self.kind.group):
            where = (block, g * (GROUP // self.kind.group) + part, at)
            scale = T.bind(T.cast(weights[1][where], f"float32x{lanes}"))
            minimum = None
            if self.kind.offset is not None:
                minimum = T.bind(T.cast(weights[2][where], f"float32x{lanes}"))
                if self.kind.offset == "zero":
                    minimum = T.bind(splat(T.float32(0), lanes) - minimum * scale)
            out.append((scale, minimum))
        return out

    def to_float(self, weights, block, start, count: int, out, isa: CpuIsa) -> None:
        """Inputs ``start .. start + count`` of a block to ``out[count * 16]`` float32."""
        lanes = isa.lanes
        if self.kind.bits is None:
            with T.serial(count) as i:
                for part in range(BLOCK // lanes):
                    value = T.cast(weights[0][block, start + i, run(part * lanes, lanes)], f"float32x{lanes}")
                    put(out, value, run(i * BLOCK + part * lanes, lanes))
            return
        with T.serial(count // GROUP) as j:
            g = T.bind(T.truncdiv(start, GROUP) + j)
            for part in range(BLOCK // lanes):
                at = run(part * lanes, lanes)
                words = self.words(weights[0], block, g, at, lanes)
                scales = self.scales(weights, block, g, at, lanes)
                for i in range(GROUP):
                    scale, minimum = scales[i // self.kind.group]
                    shifted = T.shift_right(words[i // 4], splat(T.uint32(8 * (i % 4)), lanes))
                    code = T.bitwise_and(shifted, splat(T.uint32(255), lanes))
                    value = self._value(T.reinterpret(f"int32x{lanes}", code), scale, minimum, lanes)
                    put(out, value, run((j * GROUP + i) * BLOCK + part * lanes, lanes))

    def _value(self, code, scale, minimum, lanes: int):
        """The weight of an int32 code: a code times an fp16 scale is exact, so at most one rounding."""
        if self.kind.center:
            code = code - splat(T.int32(self.kind.center), lanes)
        value = T.cast(code, f"float32x{lanes}") * scale
        return value if minimum is None else value + minimum

    def row_to_float(self, weights, block, lane, k: int, write) -> None:
        """Call ``write(input, value)`` for the inputs of output ``lane`` of a block."""
        if self.kind.bits is None:
            with T.serial(k) as i:
                write(i, T.cast(weights[0][block, i, lane], "float32"))
            return
        with T.serial(k // GROUP * 2 * HALF) as i:  # one loop, as in `prepare_blocks`
            g, at = T.bind(T.truncdiv(i, 2 * HALF)), T.bind(T.truncmod(i, 2 * HALF))
            half, j = T.bind(T.truncdiv(at, HALF)), T.bind(T.truncmod(at, HALF))
            if self.kind.bits == 4:
                word = T.shift_right(weights[0][block, g, j, lane], T.cast(4 * half, "uint32"))
                mask = 15
            else:
                word, mask = weights[0][block, (g * 2 + half) * HALF + j, lane], 255
            word = T.bind(word)
            part = g * 2 + half if self.kind.group < GROUP else g
            scale = T.bind(T.cast(weights[1][block, part, lane], "float32"))
            for byte in range(4):
                code = T.bitwise_and(T.shift_right(word, T.uint32(8 * byte)), T.uint32(mask))
                number = T.cast(T.cast(code, "int32") - self.kind.center, "float32")
                if self.kind.offset is None:
                    value = number * scale
                else:
                    offset = T.cast(weights[2][block, part, lane], "float32")
                    value = (
                        number * scale + offset if self.kind.offset == "min" else (number - offset) * scale
                    )
                write(g * GROUP + half * 16 + j * 4 + byte, value)
