"""Products of a weight with many rows, on tensor cores: blocks of outputs by rows, copies a few units ahead.

::

    out^T[outputs, rows] = W[outputs, inputs] x^T       A = the weight's units, B = rows of activations

A unit's words are operand A as they lie in memory; int4 codes become halves in registers. Rows are copied
to shared memory as they are, 64 inputs of a row in 128 bytes, where the 16-byte pieces of odd rows change
places in pairs: then a lane's 16 bytes, operand B of two products, meet no bank that another lane wants.
Warps share a block's outputs and rows, and, where rows are few, its inputs too.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from .block import ATTRIBUTES, WARP, for_threads
from .mma import block_sync, copies_commit, copies_wait, copy_async, load_shared, mma, put, u32
from .products import product_func
from .weight_fragments import STEPS, TILE, UNIT, UnitWeights, tiles, unit_words

#: Rows up to which blocks are as high as few rows need.
SOME_ROWS = 128
#: Outputs of a weight that are enough for wide blocks on every multiprocessor.
WIDE = 16384
#: Bytes of a row's inputs of one unit, and of a piece that is copied at once.
_ROW_BYTES, _PIECE = 2 * UNIT, 16
#: Bytes of a tile's scales of one unit.
_SCALE_BYTES = 64


@dataclass(frozen=True)
class TileTuning:
    """How the kernel is cut; it changes the speed, and the order of sums where inputs are shared.

    Attributes
    ----------
    output_tiles, row_tiles : int
        Tiles of 16 outputs and of 8 rows of a warp.
    output_warps, row_warps, input_warps : int
        Warps that share a block's outputs, rows and inputs.
    stages : int
        Places for units, or for ``input_warps`` neighbouring ones, in shared memory.
    """

    output_tiles: int
    row_tiles: int
    output_warps: int
    row_warps: int
    input_warps: int
    stages: int

    @property
    def outputs(self) -> int:
        """Outputs of a block."""
        return TILE * self.output_tiles * self.output_warps

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 8 * self.row_tiles * self.row_warps

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARP * self.output_warps * self.row_warps * self.input_warps


def tile_tuning(n_out: int, most_rows: int | None) -> TileTuning:
    """The tuning, measured on an H200; what it takes of shared memory fits every GPU with tensor cores."""
    if most_rows is None:
        return TileTuning(4, 8, 2, 2, 1, 4)
    # a block reads its rows for its outputs alone: with many outputs, wide blocks spare the cache
    return TileTuning(4, 8, 2, 1, 2, 3) if n_out >= WIDE else TileTuning(2, 8, 1, 1, 4, 3)


class _Tiles:
    """The statements of the kernel."""

    def __init__(self, n_out: int, k: int, storage: str, tuning: TileTuning) -> None:
        self.n_out, self.units, self.storage, self.tuning = n_out, k // UNIT, storage, tuning
        self.words = unit_words(storage)
        self.unit_bytes = 4 * WARP * self.words
        tiles_of_block, depth = tuning.outputs // TILE, tuning.input_warps
        self.scale_at = tiles_of_block * depth * self.unit_bytes
        self.row_at = self.scale_at + (tiles_of_block * depth * _SCALE_BYTES if storage == "int4" else 0)
        self.stage_bytes = self.row_at + depth * tuning.rows * _ROW_BYTES
        parts = (tuning.threads // tuning.input_warps) * (depth - 1) * 4 * self.accumulators
        self.shared_bytes = max(tuning.stages * self.stage_bytes, parts)

    @property
    def accumulators(self) -> int:
        """fp32 sums of a lane."""
        return 4 * self.tuning.output_tiles * self.tuning.row_tiles

    # ---- loading -------------------------------------------------------------------------------
    def start_copies(self, args, stage, turn, thread) -> None:
        """Start copying the units of ``turn`` to the stage at ``stage``."""
        weight, x, first_tile, first_row, n = args
        depth, tuning = self.tuning.input_warps, self.tuning
        first_unit = T.bind(turn * depth)
        block_tiles, last_tile = tuning.outputs // TILE, tiles(self.n_out) - 1

        def unit_of(which):
            return T.min(first_unit + which, self.units - 1)

        pieces = self.unit_bytes // _PIECE

        def copy_words(i):
            which, piece = T.bind(T.truncdiv(i, pieces)), T.bind(T.truncmod(i, pieces))
            tile = T.min(first_tile + T.truncdiv(which, depth), last_tile)
            unit = unit_of(T.truncmod(which, depth))
            if self.storage == "int4":
                source = T.bind(weight[0].ptr_to([tile, unit, piece, 0]))
            else:
                step, lane = T.shift_right(piece, 5), T.bitwise_and(piece, WARP - 1)
                source = T.bind(weight[0].ptr_to([tile, unit, step, lane, 0]))
            copy_async(T.bind(stage + T.cast(i * _PIECE, "uint32")), 0, source, 0)

        for_threads(block_tiles * depth * pieces, thread, tuning.threads, copy_words)
        if self.storage == "int4":
            pieces_of_scales = _SCALE_BYTES // _PIECE

            def copy_scales(i):
                which, piece = T.bind(T.truncdiv(i, pieces_of_scales)), T.bitwise_and(i, pieces_of_scales - 1)
                tile = T.min(first_tile + T.truncdiv(which, depth), last_tile)
                unit = unit_of(T.truncmod(which, depth))
                group, g = T.shift_right(piece, 1), T.bitwise_and(piece, 1) * 4
                source = T.bind(weight[1].ptr_to([tile, unit, group, g, 0]))
                copy_async(T.bind(stage + T.cast(i * _PIECE, "uint32")), self.scale_at, source, 0)

            for_threads(block_tiles * depth * pieces_of_scales, thread, tuning.threads, copy_scales)
        row_pieces = _ROW_BYTES // _PIECE

        def copy_row(i):
            line, piece = T.bind(T.truncdiv(i, row_pieces)), T.bind(T.bitwise_and(i, row_pieces - 1))
            which = T.truncdiv(line, tuning.rows)
            row = T.bind(first_row + T.truncmod(line, tuning.rows))
            # rows that do not exist stay whatever they are: they are columns of B that nobody stores
            with T.If(row < n), T.Then():
                source = T.bind(x.ptr_to([row, unit_of(which) * UNIT + piece * (_PIECE // 2)]))
                place = T.bitwise_xor(piece, T.bitwise_and(line, 1))
                target = T.bind(stage + T.cast(line * _ROW_BYTES + place * _PIECE, "uint32"))
                copy_async(target, self.row_at, source, 0)

        for_threads(depth * tuning.rows * row_pieces, thread, tuning.threads, copy_row)

    # ---- a unit --------------------------------------------------------------------------------
    def add_unit(self, stage, output_warp, row_warp, input_warp, lane, acc) -> None:
        """Add the warp's products of a unit in the stage."""
        tuning, depth = self.tuning, self.tuning.input_warps
        g, c = T.bind(T.shift_right(lane, 2)), T.bind(T.bitwise_and(lane, 3))
        stride = self.words + (1 if self.storage == "int4" else 0)
        held = T.alloc_local([tuning.output_tiles * stride], "uint32")
        first = T.bind((output_warp * tuning.output_tiles) * depth + input_warp)
        words = T.bind(stage + T.cast(first * self.unit_bytes + lane * 16, "uint32"))
        scales = T.bind(
            stage + T.cast(first * _SCALE_BYTES + T.shift_right(c, 1) * (_SCALE_BYTES // 2) + g * 4, "uint32")
        )
        weights = []
        for i in range(tuning.output_tiles):
            at = i * stride
            for piece in range(self.words // 4):
                offset = i * depth * self.unit_bytes + piece * 4 * WARP * 4
                load_shared(held, at + 4 * piece, 4, words, offset)
            if self.storage == "int4":
                load_shared(held, at + self.words, 1, scales, self.scale_at + i * depth * _SCALE_BYTES)
            weights.append(UnitWeights(self.storage, held, at, at + self.words))
        line = T.bind((input_warp * tuning.row_warps + row_warp) * (8 * tuning.row_tiles) + g)
        rows = T.bind(stage + T.cast(line * _ROW_BYTES, "uint32"))
        b = T.alloc_local([4 * tuning.row_tiles], "uint32")
        a = T.alloc_local([4], "uint32")
        for half in range(2):
            piece = T.bitwise_xor(2 * c + half, T.bitwise_and(line, 1))
            address = T.bind(rows + T.cast(piece * _PIECE, "uint32"))
            for j in range(tuning.row_tiles):
                load_shared(b, 4 * j, 4, address, self.row_at + j * 8 * _ROW_BYTES)
            for step in range(STEPS // 2):
                for i in range(tuning.output_tiles):
                    registers = weights[i].registers(2 * half + step, a)
                    for j in range(tuning.row_tiles):
                        at = 4 * (i * tuning.row_tiles + j)
                        mma(acc, at, registers, [b[4 * j + 2 * step + y] for y in range(2)])

    # ---- a block -------------------------------------------------------------------------------
    def block(self, weight, x, added, out, n, block_row, block_output, thread, shared, red) -> None:
        """A block's outputs of its rows."""
        tuning = self.tuning
        lane, warp = T.bind(T.bitwise_and(thread, WARP - 1)), T.bind(T.shift_right(thread, 5))
        output_warp = T.bind(T.truncmod(warp, tuning.output_warps))
        others = T.bind(T.truncdiv(warp, tuning.output_warps))
        row_warp = T.bind(T.truncmod(others, tuning.row_warps))
        input_warp = T.bind(T.truncdiv(others, tuning.row_warps))
        first_tile = T.bind(block_output * (tuning.outputs // TILE))
        first_row = T.bind(block_row * tuning.rows)
        args = (weight, x, first_tile, first_row, n)
        base = T.bind(T.cuda.cvta_generic_to_shared(shared.data))
        acc = T.alloc_local([self.accumulators], "float32")
        for i in range(self.accumulators):
            put(acc, T.float32(0), i)
        turns = -(-self.units // tuning.input_warps)
        for s in range(tuning.stages - 1):
            if s < turns:
                self.start_copies(args, base + u32(s * self.stage_bytes), T.int32(s), thread)
            copies_commit()
        reading, writing = T.alloc_local([1], "int32"), T.alloc_local([1], "int32")
        put(reading, T.int32(0), 0)
        put(writing, T.int32(tuning.stages - 1), 0)
        with T.serial(turns) as turn:
            copies_wait(tuning.stages - 2)
            block_sync()
            ahead = T.bind(turn + (tuning.stages - 1))
            with T.If(ahead < turns), T.Then():
                target = T.bind(base + T.cast(writing[0] * self.stage_bytes, "uint32"))
                self.start_copies(args, target, ahead, thread)
            copies_commit()
            stage = T.bind(base + T.cast(reading[0] * self.stage_bytes, "uint32"))
            if self.units % tuning.input_warps:
                with T.If(turn * tuning.input_warps + input_warp < self.units), T.Then():
                    self.add_unit(stage, output_warp, row_warp, input_warp, lane, acc)
            else:
                self.add_unit(stage, output_warp, row_warp, input_warp, lane, acc)
            for place in (reading, writing):
                following = T.bind(place[0] + 1)
                put(place, T.Select(following == tuning.stages, T.int32(0), following), 0)
        if tuning.input_warps > 1:
            self._add_parts(acc, warp, input_warp, lane, red)
        with T.If(input_warp == 0), T.Then():
            self._store(acc, added, out, n, first_tile, first_row, output_warp, row_warp, lane)

    def _add_parts(self, acc, warp, input_warp, lane, red) -> None:
        """Add up the sums of the warps that share inputs, in order, in the first of them."""
        count = self.tuning.output_warps * self.tuning.row_warps
        copies_wait(0)
        block_sync()
        with T.If(input_warp > 0), T.Then():
            for i in range(self.accumulators):
                put(red, acc[i], (((warp - count) * self.accumulators) + i) * WARP + lane)
        block_sync()
        with T.If(input_warp == 0), T.Then():
            for other in range(self.tuning.input_warps - 1):
                for i in range(self.accumulators):
                    part = red[((other * count + warp) * self.accumulators + i) * WARP + lane]
                    put(acc, acc[i] + part, i)

    def _store(self, acc, added, out, n, first_tile, first_row, output_warp, row_warp, lane) -> None:
        tuning = self.tuning
        g, c = T.bind(T.shift_right(lane, 2)), T.bind(T.bitwise_and(lane, 3))
        output = T.bind((first_tile + output_warp * tuning.output_tiles) * TILE + g)
        row = T.bind(first_row + row_warp * (8 * tuning.row_tiles) + 2 * c)
        for j in range(tuning.row_tiles):
            for y in range(2):
                at_row = T.bind(row + 8 * j + y)
                with T.If(at_row < n), T.Then():
                    for i in range(tuning.output_tiles):
                        for x in range(2):
                            at = T.bind(output + i * TILE + 8 * x)
                            total = acc[4 * (i * tuning.row_tiles + j) + 2 * x + y]
                            with T.If(at < self.n_out), T.Then():
                                if added is not None:
                                    total = added[at_row, at] + total
                                put(out, total, at_row, at)


def linear_tiles(
    n_out: int, k: int, storage: str, tuning: TileTuning, residual: bool = False
) -> tirx.PrimFunc:
    """Build the product for any number of rows; its arguments are those of ``products.py``."""
    kernel = _Tiles(n_out, k, storage, tuning)
    columns = -(-n_out // tuning.outputs)

    def body(weight, x, added, out, n):
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        lines = T.truncdiv(T.cast(n, "int32") + (tuning.rows - 1), tuning.rows)
        block_row, block_output = T.cta_id([lines, columns])
        rows = T.bind(T.cast(n, "int32"))
        thread = T.thread_id([tuning.threads])
        shared = T.alloc_buffer((kernel.shared_bytes,), "uint8", scope="shared.dyn", align=128)
        T.attr({"tirx.dyn_smem_bytes": kernel.shared_bytes})
        red = T.decl_buffer(
            (kernel.shared_bytes // 4,), "float32", shared.data, elem_offset=0, scope="shared.dyn"
        )
        kernel.block(weight, x, added, out, rows, block_row, block_output, thread, shared, red)

    return product_func(n_out, k, storage, residual, ATTRIBUTES, body)
