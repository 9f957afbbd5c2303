"""What becomes of the sums of a product of many rows: parts are added up, in a fixed order, and stored.

A lane has four sums of each tile of 16 outputs by 8 rows: outputs g and g + 8, rows 2c and 2c + 1. Parts of
warps that share inputs meet in shared memory, where the stages were; of two blocks that share inputs, each
ends half of the sums and reads the other's parts.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.schedules.statements import put

from .block import WARP
from .mma import block_sync, copies_wait, emit, u32
from .pointwise import activate, put_rounded
from .tile_tuning import TileTuning
from .weight_fragments import OPERAND, TILE


class TilePlace:
    """Which outputs, rows and inputs of a block are the warp's, as expressions.

    Parameters
    ----------
    tuning : TileTuning
        How the kernel is cut.
    gated : bool
        Whether half of the block's tiles are partners of the other half, not neighbours.
    """

    def __init__(self, tuning: TileTuning, gated: bool, block_row, block_output, thread) -> None:
        self.lane, warp = T.bind(T.bitwise_and(thread, WARP - 1)), T.bind(T.shift_right(thread, 5))
        self.g, self.c = T.bind(T.shift_right(self.lane, 2)), T.bind(T.bitwise_and(self.lane, 3))
        places = tuning.output_warps * tuning.row_warps
        self.number = T.bind(T.truncmod(warp, places))
        self.input_warp = T.bind(T.truncdiv(warp, places))
        self.output_warp = T.bind(T.truncmod(self.number, tuning.output_warps))
        self.row_warp = T.bind(T.truncdiv(self.number, tuning.output_warps))
        block_tiles = tuning.outputs // TILE // (2 if gated else 1)
        self.first_tile = T.bind(block_output * block_tiles)
        self.first_row = T.bind(block_row * tuning.rows)


class TileSums:
    """The statements that end a block.

    Parameters
    ----------
    n_out : int
        Outputs of the weight.
    tuning : TileTuning
        How the kernel is cut.
    activation : str or None
        Of a gated product.
    dtype : str
        What a gated product stores.
    staged_bytes : int
        Shared memory that is free again at the end.

    Attributes
    ----------
    count : int
        fp32 sums of a lane.
    shared_bytes : int
        Shared memory of a block, stages and all.
    """

    def __init__(
        self, n_out: int, tuning: TileTuning, activation: str | None, dtype: str, staged_bytes: int
    ) -> None:
        self.n_out, self.tuning, self.activation, self.dtype = n_out, tuning, activation, dtype
        self.count = 4 * tuning.output_tiles * tuning.row_tiles
        self.places = tuning.output_warps * tuning.row_warps
        self.meets = tuning.input_warps * tuning.splits > 1
        of_warps = self.places * self.count * WARP * 4
        self.exchange_at = max(staged_bytes, tuning.input_warps * of_warps if self.meets else 0)
        self.shared_bytes = self.exchange_at + (of_warps // 2 if tuning.splits > 1 else 0)

    def end(self, acc, place: TilePlace, rank, red, added, out, n) -> None:
        """Add up and store; ``red`` is shared memory as float32, ``rank`` the block's number in a cluster."""
        self.place, self.n = place, n
        if self.activation:
            self._store_gated(acc, out)
        elif self.meets:
            self._add_parts(acc, rank, red, added, out)
        else:
            for quad in range(self.count // 4):
                self._store(T.int32(quad), [acc[4 * quad + i] for i in range(4)], added, out)

    def _add_parts(self, acc, rank, red, added, out) -> None:
        """Add up the parts of warps and blocks that share inputs; each warp ends some of the sums."""
        place, warps, splits = self.place, self.tuning.input_warps, self.tuning.splits
        quads = self.count // 4
        share = quads // (warps * splits)
        assert share * warps * splits == quads, "the warps cannot share the sums evenly"
        copies_wait(0)
        block_sync()
        mine = T.bind((place.input_warp * self.places + place.number) * self.count * WARP + place.lane)
        for i in range(self.count):
            put(red, acc[i], mine + i * WARP)
        block_sync()
        total = T.alloc_local([4], "float32")

        def add(quad) -> None:
            first = T.bind((place.number * self.count + 4 * quad) * WARP + place.lane)
            for i in range(4):
                value = red[first + i * WARP]
                for other in range(1, warps):
                    value = value + red[first + (other * self.places * self.count + i) * WARP]
                put(total, value, i)

        own = T.bind((rank * warps + place.input_warp) * share)
        if splits == 1:
            for s in range(share):
                quad = T.bind(own + s)
                add(quad)
                self._store(quad, [total[i] for i in range(4)], added, out)
            return
        # what the other block ends goes to the exchange, where that block reads it
        assert splits == 2
        theirs = T.bind(((1 - rank) * warps + place.input_warp) * share)
        at = T.bind((place.input_warp * self.places + place.number) * share * 4 * WARP + place.lane)
        exchange = self.exchange_at // 4
        for s in range(share):
            add(T.bind(theirs + s))
            for i in range(4):
                put(red, total[i], exchange + at + (4 * s + i) * WARP)
        cluster_sync()
        remote = T.alloc_local([1], "uint32")
        start = T.cuda.cvta_generic_to_shared(red.data) + u32(self.exchange_at)
        address = T.bind(start + T.cast(at * 4, "uint32"))
        emit(T.ptx["mapa.shared::cluster.u32"](remote[0], address, T.cast(1 - rank, "uint32")))
        part = T.alloc_local([4], "float32")
        for s in range(share):
            for i in range(4):
                offset = (4 * s + i) * WARP * 4
                emit(T.ptx["ld.shared::cluster.f32"](part[i], T.ptx.addr(remote[0], offset)))
            quad = T.bind(own + s)
            add(quad)
            self._store(quad, [total[i] + part[i] for i in range(4)], added, out)
        cluster_sync()

    def _store(self, quad, sums, added, out) -> None:
        """Store four sums of a lane, number ``quad`` of the warp's tiles."""
        tuning, place = self.tuning, self.place
        i, j = T.bind(T.truncdiv(quad, tuning.row_tiles)), T.bind(T.truncmod(quad, tuning.row_tiles))
        tile = T.bind(place.first_tile + place.output_warp + i * tuning.output_warps)
        row = T.bind(place.first_row + (place.row_warp * tuning.row_tiles + j) * 8 + 2 * place.c)
        exact = self.n_out % tuning.outputs == 0
        for y in range(2):
            for x in range(2):
                at = T.bind(tile * TILE + place.g + 8 * x)
                inside = row + y < self.n
                with T.If(inside if exact else T.And(inside, at < self.n_out)), T.Then():
                    value = sums[2 * x + y]
                    put(out, value if added is None else added[row + y, at] + value, row + y, at)

    def _store_gated(self, acc, out) -> None:
        """Store what the activation of a lane's first tile lets through of its second."""
        tuning, place = self.tuning, self.place
        output = T.bind((place.first_tile + place.output_warp) * TILE + place.g)
        row = T.bind(place.first_row + place.row_warp * tuning.row_tiles * 8 + 2 * place.c)
        for j in range(tuning.row_tiles):
            for y in range(2):
                inside = T.And(row + 8 * j + y < self.n, output < self.n_out // 2)
                with T.If(inside), T.Then():
                    for x in range(2):
                        at = 4 * j + 2 * x + y
                        value = activate(acc[at], self.activation) * acc[4 * tuning.row_tiles + at]
                        put_rounded(out, value, self.dtype, OPERAND, row + 8 * j + y, output + 8 * x)


def gates(n_out: int, tuning: TileTuning) -> bool:
    """Whether such a product can be gated: a lane must have both halves, whole, of what it stores."""
    whole = tuning.input_warps * tuning.splits == 1 and n_out % (2 * TILE) == 0
    return whole and tuning.output_tiles == 2


def cluster_sync() -> None:
    """Wait for all threads of the cluster, and see what they wrote to shared memory."""
    emit(T.ptx["barrier.cluster.arrive.release.aligned"]())
    emit(T.ptx["barrier.cluster.wait.acquire.aligned"]())
