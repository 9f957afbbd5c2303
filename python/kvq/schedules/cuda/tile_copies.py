"""What a block of a product of many rows copies to shared memory, stage by stage.

A stage holds ``depth`` neighbouring units of the block's tiles and the same inputs of its rows::

    rows    [depth, rows, 128]       64 inputs of a row, in eight pieces that change places by the row
    words   [tiles, depth, unit]     as they lie in memory
    scales  [tiles, depth, 64]       of int4

Piece p of a row lies in place ``p ^ (row & 7)``: what ``wgmma`` calls a swizzle of 128 bytes, and free of
bank conflicts for ``ldmatrix``.

Threads copy 16-byte pieces. Numbers of threads, and of pieces of a line, are powers of two, so each thread's
pieces lie at constant distances: an address is computed once a turn, and a copy is one instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T

from kvq.schedules.statements import when

from .block import WARP
from .mma import copy_async
from .weight_fragments import UNIT, tiles, unit_words

#: Bytes of a row's inputs of one unit, of a piece that is copied at once, and of a tile's scales of one unit.
ROW_BYTES, PIECE, SCALE_BYTES = 2 * UNIT, 16, 64
#: Where a stage may start: eight rows are what the swizzle repeats after.
STAGE_ALIGN = 8 * ROW_BYTES


def stage_bytes(storage: str, block_tiles: int, rows: int, depth: int) -> int:
    """Bytes of a stage of so many tiles, rows and units."""
    of_tile = 4 * WARP * unit_words(storage) + (SCALE_BYTES if storage == "int4" else 0)
    return -(-depth * (rows * ROW_BYTES + block_tiles * of_tile) // STAGE_ALIGN) * STAGE_ALIGN


class TileCopies:
    """The layout of a stage, and the statements that fill one.

    Parameters
    ----------
    n_out, k, storage
        The weight.
    block_tiles, rows : int
        Tiles and rows of a block.
    depth : int
        Units of a stage, a power of two.
    units : int
        Units that a block walks through.
    threads : int
        Threads of a block, a power of two.
    pairs : int
        A power of two: so many of a block's tiles are of the first half of the outputs, the others their
        partners in the second, and ``first_tile`` is one of the first. 0: a block's tiles are neighbours.
    """

    def __init__(
        self,
        n_out: int,
        k: int,
        storage: str,
        block_tiles: int,
        rows: int,
        depth: int,
        units: int,
        threads: int,
        pairs: int = 0,
    ) -> None:
        assert depth & (depth - 1) == 0 and threads & (threads - 1) == 0
        self.k, self.all_units, self.tiles, self.block_tiles = k, k // UNIT, tiles(n_out), block_tiles
        self.rows, self.depth, self.units, self.threads = rows, depth, units, threads
        self.pairs, self.half = pairs, self.tiles // 2 if pairs else self.tiles
        self.int4 = storage == "int4"
        self.unit_bytes = 4 * WARP * unit_words(storage)
        self.word_at = depth * rows * ROW_BYTES
        self.scale_at = self.word_at + block_tiles * depth * self.unit_bytes
        self.stage_bytes = stage_bytes(storage, block_tiles, rows, depth)
        #: Whether every unit of every stage exists.
        self.whole = self.all_units % units == 0 and units % depth == 0

    def begin(self, weight: Sequence[Any], x: Any, first_tile, first_row, first_unit, n, thread) -> None:
        """Compute the thread's addresses; the block starts at ``first_unit``."""
        self.n, self.thread, self.first_tile, self.first_unit = n, thread, first_tile, first_unit
        self.end = T.bind(T.min(first_unit + self.units, self.all_units))
        self.words = self._line(self.depth * self.unit_bytes // PIECE)
        self.row = self._line(ROW_BYTES // PIECE)
        self.weight, self.x = weight, x
        self.word_tile = T.bind(T.min(self._tile(self.words[0]), self.tiles - 1))
        if self.int4:
            self.scales = self._line(self.depth * SCALE_BYTES // PIECE)
            self.scale_tile = T.bind(T.min(self._tile(self.scales[0]), self.tiles - 1))
        self.own_row = T.bind(first_row + T.bitwise_and(self.row[0], self.rows - 1))

    def _tile(self, line):
        """The weight's tile that is the block's tile ``line``."""
        if not self.pairs:
            return self.first_tile + line
        return self.first_tile + T.truncmod(line, self.pairs) + T.truncdiv(line, self.pairs) * self.half

    def _line(self, pieces: int) -> tuple[Any, Any]:
        """Line and piece of the thread's first copy, where a line has so many pieces."""
        return T.bind(T.truncdiv(self.thread, pieces)), T.bind(T.truncmod(self.thread, pieces))

    def _steps(self, lines: int, pieces: int):
        """Of each copy of a thread: lines and pieces after its first one, and whether all threads copy."""
        for start in range(0, lines * pieces, self.threads):
            yield start // pieces, start % pieces, start + self.threads <= lines * pieces

    def copy_weights(self, stage, turn) -> None:
        """Start copying the words and scales of ``turn`` to the stage at ``stage``."""
        unit = T.bind(self.first_unit + turn * self.depth)
        # an index beyond its dimension is one of the unit behind: a line is in one piece
        between = [0] * (len(self.weight[0].shape) - 4)
        source = T.bind(self.weight[0].ptr_to([self.word_tile, unit, *between, self.words[1], 0]))
        self._copy_lines(stage, unit, self.words, source, self.word_at, self.unit_bytes)
        if self.int4:
            source = T.bind(
                self.weight[1].ptr_to([self.scale_tile, unit, 0, 0, self.scales[1] * (PIECE // 2)])
            )
            self._copy_lines(stage, unit, self.scales, source, self.scale_at, SCALE_BYTES)

    def _copy_lines(self, stage, unit, place, source, at: int, unit_bytes: int) -> None:
        """Copy a line for each tile of the block."""
        line, piece = place
        pieces = self.depth * unit_bytes // PIECE
        target = T.bind(stage + T.cast(self.thread * PIECE, "uint32"))
        for lines, more, everyone in self._steps(self.block_tiles, pieces):
            conditions = []
            if not everyone:
                conditions.append(self.thread < (self.block_tiles - lines) * pieces - more)
            if self.pairs:
                # lines of a step are a power of two, too: the remainders add up to less than pairs
                pair = T.truncmod(line, self.pairs) + lines % self.pairs
                conditions.append(self.first_tile + pair < self.half)
            elif self.tiles % self.block_tiles:
                conditions.append(self.first_tile + line + lines < self.tiles)
            further = lines % self.pairs + lines // self.pairs * self.half if self.pairs else lines
            if not self.whole:
                which = T.truncdiv(piece + more, unit_bytes // PIECE)
                conditions.append(unit + which < self.end)
            offset = further * self.all_units * unit_bytes + more * PIECE
            self._copy(conditions, target, at + (lines * pieces + more) * PIECE, source, offset)

    def copy_rows(self, stage, turn) -> None:
        """Start copying the rows of ``turn`` to the stage at ``stage``."""
        line, piece = self.row
        unit = T.bind(self.first_unit + turn * self.depth + T.truncdiv(line, self.rows))
        place = T.bitwise_xor(piece, T.bitwise_and(line, 7))
        target = T.bind(stage + T.cast(line * ROW_BYTES + place * PIECE, "uint32"))
        source = T.bind(self.x.ptr_to([self.own_row, unit * UNIT + piece * (PIECE // 2)]))
        for lines, _, everyone in self._steps(self.depth * self.rows, ROW_BYTES // PIECE):
            units, below = divmod(lines, self.rows)
            # rows that do not exist stay whatever they are: they are columns of B that nobody stores
            conditions = [self.own_row + below < self.n]
            if not everyone:
                conditions.append(line < self.depth * self.rows - lines)
            if not self.whole:
                conditions.append(unit + units < self.end)
            offset = below * self.k * 2 + units * ROW_BYTES
            self._copy(conditions, target, lines * ROW_BYTES, source, offset)

    @staticmethod
    def _copy(conditions: list, target, to: int, source, offset: int) -> None:
        if not conditions:
            copy_async(target, to, source, offset)
            return
        condition = conditions[0]
        for other in conditions[1:]:
            condition = T.And(condition, other)
        when(condition, lambda: copy_async(target, to, source, offset))
