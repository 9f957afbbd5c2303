"""Products of a weight with many rows, on tensor cores: blocks of outputs by rows, copies a few units ahead.

::

    out^T[outputs, rows] = W[outputs, inputs] x^T       A = the weight's units, B = rows of activations

A unit's words are operand A as they lie in memory; int4 codes become halves in registers. Rows are operand B,
in shared memory. Warps, by themselves or in fours, share a block's outputs and rows and, where rows are few,
its inputs too; two blocks, a cluster, may share inputs as well (``tile_sums.py``).

A product may be gated: then a warp has tiles of both halves of the outputs, ``act(first) * second`` is what
it stores, rounded, and the halves themselves are never written.

Where GPUs allow it, the kernel starts while the one before it runs: weights do not depend on it.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from kvq.schedules.statements import put, when

from .block import WARP, kernel_attributes, let_next_start, wait_for_rows
from .mma import block_sync, copies_commit, copies_wait, load_matrices, load_shared, mma, u32
from .products import product_func
from .tile_copies import PIECE, ROW_BYTES, SCALE_BYTES, STAGE_ALIGN, TileCopies
from .tile_sums import TilePlace, TileSums, gates
from .tile_tuning import TileTuning
from .unit_weights import UnitWeights
from .weight_fragments import STEPS, TILE, UNIT, unit_words
from .wgmma import SWIZZLED_ROWS, async_fence, wgmma, wgmma_commit, wgmma_fence, wgmma_wait


class TileProduct:
    """The statements of the kernel.

    Attributes
    ----------
    shared_bytes : int
        Dynamic shared memory of a block.
    """

    def __init__(
        self,
        n_out: int,
        k: int,
        storage: str,
        tuning: TileTuning,
        activation: str | None = None,
        dtype: str = "float16",
    ) -> None:
        self.storage, self.tuning, self.activation, self.dtype = storage, tuning, activation, dtype
        assert activation is None or gates(n_out, tuning)
        self.words = unit_words(storage)
        depth = tuning.input_warps
        units = -(-(k // UNIT) // tuning.splits)
        self.turns = -(-units // depth)
        self.copies = TileCopies(
            n_out,
            k,
            storage,
            tuning.outputs // TILE,
            tuning.rows,
            depth,
            units,
            tuning.threads,
            pairs=tuning.output_warps if activation else 0,
        )
        self.sums = TileSums(n_out, tuning, activation, dtype, tuning.stages * self.copies.stage_bytes)
        self.shared_bytes = self.sums.shared_bytes

    # ---- a unit --------------------------------------------------------------------------------
    def load_weights(self, stage) -> list[UnitWeights]:
        """The warp's weights of its unit in the stage: of each tile."""
        tuning, copies = self.tuning, self.copies
        stride = self.words + (1 if self.storage == "int4" else 0)
        held = T.alloc_local([tuning.output_tiles * stride], "uint32")
        words, scales = T.bind(stage + self.word_offset), T.bind(stage + self.scale_offset)
        weights = []
        for i in range(tuning.output_tiles):
            at = i * stride
            for piece in range(self.words // 4):
                self._load_piece(words, i, piece, held, at + 4 * piece)
            if self.storage == "int4":
                offset = copies.scale_at + self._lines(i) * SCALE_BYTES
                load_shared(held, at + self.words, 1, scales, offset)
            weights.append(UnitWeights(self.storage, held, at, at + self.words, self.dtype))
        return weights

    def _lines(self, i: int) -> int:
        """Lines of a stage between the warp's first tile and tile ``i``."""
        return i * self.tuning.output_warps * self.tuning.input_warps

    def _load_piece(self, words, i: int, piece: int, out, at: int) -> None:
        """The lane's 16 bytes number ``piece`` of tile ``i``, of the unit whose words are at ``words``."""
        copies = self.copies
        offset = copies.word_at + self._lines(i) * copies.unit_bytes + piece * WARP * PIECE
        load_shared(out, at, 4, words, offset)

    def add_unit(self, stage, acc) -> None:
        """Add the warp's products of its unit in the stage."""
        weights, row_tiles = self.load_weights(stage), self.tuning.row_tiles
        b = T.alloc_local([4 * row_tiles], "uint32")
        a = T.alloc_local([4], "uint32")
        for half in range(2):
            address = T.bind(stage + self.row_offset[half])
            for j in range(row_tiles):
                load_matrices(b, 4 * j, address, j * 8 * ROW_BYTES)
            for step in range(STEPS // 2):
                for i, weight in enumerate(weights):
                    registers = weight.registers(2 * half + step, a)
                    for j in range(row_tiles):
                        at = 4 * (i * row_tiles + j)
                        mma(acc, at, registers, [b[4 * j + 2 * step + y] for y in range(2)], dtype=self.dtype)

    def start_unit(self, stage, a, acc) -> None:
        """Start the warpgroup's products of its unit in the stage; half of them may still run afterwards.

        ``a`` holds operand A of both halves: one is made while the tensor cores read the other. Nothing else
        may be read by them, for it would be filled again too early.
        """
        tiles, count = self.tuning.output_tiles, self.tuning.row_tiles * 4
        codes = self.load_weights(stage) if self.storage == "int4" else None
        words = T.bind(stage + self.word_offset)
        rows = T.bind(T.cast(T.shift_right(stage + self.group_offset, u32(4)), "uint64"))
        for half in range(2):
            places = {}
            for step in range(STEPS // 2):
                for i in range(tiles):
                    at = places[step, i] = ((half * tiles + i) * 2 + step) * 4
                    if codes is None:
                        self._load_piece(words, i, 2 * half + step, a, at)
                    else:
                        codes[i].registers(2 * half + step, a, at)
            wgmma_fence()
            for step in range(STEPS // 2):
                operand = T.bind(rows + T.uint64(SWIZZLED_ROWS + (2 * half + step) * 2))
                for i in range(tiles):
                    registers = [a[places[step, i] + p] for p in range(4)]
                    wgmma(acc, i * count, count, registers, operand, self.dtype)
            wgmma_commit()
            wgmma_wait(1)

    # ---- a block -------------------------------------------------------------------------------
    def block(self, weight, x, added, out, n, rank, block_row, block_output, thread, shared, red) -> None:
        """A block's outputs of its rows; it is number ``rank`` of its cluster."""
        tuning = self.tuning
        let_next_start(tuning.overlap)
        place = TilePlace(tuning, self.activation is not None, block_row, block_output, thread)
        self._find_offsets(place)
        first_unit = T.bind(rank * self.copies.units)
        self.copies.begin(weight, x, place.first_tile, place.first_row, first_unit, n, thread)
        base = T.bind(T.cuda.cvta_generic_to_shared(shared.data))
        acc = T.alloc_local([self.sums.count], "float32")
        for i in range(self.sums.count):
            put(acc, T.float32(0), i)
        # a stage is free again when everybody has left it: with wgmma, one turn later
        lead = tuning.stages - (2 if tuning.wgmma else 1)
        ahead = min(lead, self.turns)
        for s in range(ahead):
            self.copies.copy_weights(base + u32(s * self.copies.stage_bytes), T.int32(s))
        wait_for_rows(tuning.overlap)
        for s in range(lead):
            if s < ahead:
                self.copies.copy_rows(base + u32(s * self.copies.stage_bytes), T.int32(s))
            copies_commit()
        reading, writing = T.alloc_local([1], "int32"), T.alloc_local([1], "int32")
        put(reading, T.int32(0), 0)
        put(writing, T.int32(lead), 0)
        a = T.alloc_local([16 * tuning.output_tiles], "uint32") if tuning.wgmma else None
        with T.serial(self.turns) as turn:
            copies_wait(lead - 1)
            if tuning.wgmma:
                async_fence()
            block_sync()
            following_turn = T.bind(turn + lead)
            with T.If(following_turn < self.turns), T.Then():
                target = T.bind(base + T.cast(writing[0] * self.copies.stage_bytes, "uint32"))
                self.copies.copy_weights(target, following_turn)
                self.copies.copy_rows(target, following_turn)
            copies_commit()
            stage = T.bind(base + T.cast(reading[0] * self.copies.stage_bytes, "uint32"))

            def add(stage=stage):
                if tuning.wgmma:
                    self.start_unit(stage, a, acc)
                else:
                    self.add_unit(stage, acc)

            if self.copies.whole:
                add()
            else:
                when(first_unit + turn * tuning.input_warps + place.input_warp < self.copies.end, add)
            for stage_number in (reading, writing):
                following = T.bind(stage_number[0] + 1)
                put(stage_number, T.Select(following == tuning.stages, T.int32(0), following), 0)
        if tuning.wgmma:
            wgmma_wait(0)
        self.sums.end(acc, place, rank, red, added, out, n)

    def _find_offsets(self, place: TilePlace) -> None:
        """Where in a stage the warp finds its words, scales and rows."""
        tuning, depth, copies, lane = self.tuning, self.tuning.input_warps, self.copies, place.lane
        first = T.bind(place.output_warp * depth + place.input_warp)
        self.word_offset = T.bind(T.cast(first * copies.unit_bytes + lane * PIECE, "uint32"))
        group = T.shift_right(place.c, 1) * (SCALE_BYTES // 2)
        self.scale_offset = T.bind(T.cast(first * SCALE_BYTES + group + place.g * 4, "uint32"))
        self.group_offset = T.bind(T.cast(place.input_warp * tuning.rows * ROW_BYTES, "uint32"))
        # the row and the piece of it that the lane names for ldmatrix
        within = T.bind(T.bitwise_and(lane, 7))
        row_warp = place.input_warp * tuning.row_warps + place.row_warp
        line = T.bind(row_warp * (8 * tuning.row_tiles) + within)
        self.row_offset = []
        for half in range(2):
            piece = T.bitwise_xor(4 * half + T.shift_right(lane, 3), within)
            self.row_offset.append(T.bind(T.cast(line * ROW_BYTES + piece * PIECE, "uint32")))


def linear_tiles(
    n_out: int,
    k: int,
    storage: str,
    tuning: TileTuning,
    residual: bool = False,
    activation: str | None = None,
    dtype: str = "float16",
) -> tirx.PrimFunc:
    """Build the product for any number of rows; its arguments are those of ``products.py``."""
    kernel = TileProduct(n_out, k, storage, tuning, activation, dtype)
    columns = -(-n_out // tuning.outputs)

    def body(weight, x, _gain, added, out, n):
        with T.attr({"tirx.dyn_smem_bytes": kernel.shared_bytes}):
            rows = T.cast(n, "int32")
            lines = T.truncdiv(rows + (tuning.rows - 1), tuning.rows)
            if tuning.splits > 1:
                T.cta_id_in_cluster([tuning.splits, 1, 1])
                place = T.cta_id([tuning.splits, lines, columns])
            else:
                place = (T.int32(0), *T.cta_id([lines, columns]))
            thread = T.thread_id([tuning.threads])
            shared = T.alloc_buffer((kernel.shared_bytes,), "uint8", scope="shared.dyn", align=STAGE_ALIGN)
            red = T.decl_buffer(
                (kernel.shared_bytes // 4,), "float32", shared.data, elem_offset=0, scope="shared.dyn"
            )
            kernel.block(weight, x, added, out, T.bind(rows), *place, thread, shared, red)

    attributes = kernel_attributes(tuning.overlap)
    return product_func(n_out, k, storage, residual, attributes, body, activation is not None, dtype)
