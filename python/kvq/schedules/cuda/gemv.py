"""Products of a weight with one to four rows: decoding for few users, bound by reading the weight once.

A block makes some tiles of 16 outputs; its warps share the inputs, unit by unit in turn, and add up in a
fixed order. A warp keeps units ahead in registers, the first of them on their way before the kernel before
this one has ended. Then the block brings the rows to shared memory, normalized and rounded where they are
not yet.

int4 codes are operand A as they are (``code_sums.py``). The eight columns of operand B are two groups of 32
inputs by four rows: of a unit, column ``4 * group + row`` has the inputs of its group and zeros. So each sum
has one scale, and it is that of the inputs whose codes the lane holds.

A gated product has tiles of both halves of the outputs, and stores ``act(first) * second``, rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script import tirx as T

from kvq.schedules.backend import ROUNDED, RowSource
from kvq.schedules.statements import put, when

from .block import WARP, arch_number, kernel_attributes, let_next_start, wait_for_rows
from .code_sums import CODE_SUMS
from .gemv_rows import MOST_ROWS, SharedRows
from .gemv_tuning import GemvTuning
from .mma import block_sync, load_global, load_shared, mma, shuffle_xor, u32
from .pointwise import activate, put_rounded
from .products import product_func
from .tile_tuning import SHARED_KIB
from .weight_fragments import STEPS, TILE, UNIT, tiles, unit_words

#: How weights are read: once. Not as ``.nc``, which ptxas moves behind the wait for the kernel before.
_ONCE = ".L1::no_allocate"


class Gemv:
    """The statements of the kernel.

    Parameters
    ----------
    n_out, k, storage
        The weight.
    tuning : GemvTuning
        How it is cut.
    rows : RowSource
        What its rows are.
    activation : str or None
        Of a gated product.
    dtype : str
        Of the operands.

    Attributes
    ----------
    blocks, shared_bytes : int
        How many blocks there are, and the dynamic shared memory of each.
    """

    def __init__(
        self,
        n_out: int,
        k: int,
        storage: str,
        tuning: GemvTuning,
        rows: RowSource = ROUNDED,
        activation: str | None = None,
        dtype: str = "float16",
    ) -> None:
        assert tuning.threads >= MOST_ROWS * tuning.tiles * TILE and tuning.warps % 4 == 0
        assert activation is None or (gates(n_out) and tuning.tiles % 2 == 0)
        self.n_out, self.storage, self.tuning = n_out, storage, tuning
        self.activation, self.dtype = activation, dtype
        self.codes = CODE_SUMS[dtype] if storage == "int4" else None
        self.units = k // UNIT
        self.even = self.units % tuning.warps == 0
        #: items of a warp: units of all tiles of a pass
        self.count = -(-self.units // tuning.warps)
        self.items = self.count * tuning.passes
        self.ahead = min(tuning.ahead, self.items)
        self.stride = unit_words(storage) + (1 if self.codes else 0)
        center = self.codes.center if self.codes else None
        self.rows = SharedRows(k, rows, tuning.threads, dtype, center)
        self.half = tiles(n_out) // 2 if activation else 0
        #: tiles of a pass that are neighbours, and those there are
        self.run = tuning.tiles // 2 if activation else tuning.tiles
        self.lines = self.half or tiles(n_out)
        self.blocks = -(-self.lines // (self.run * tuning.passes))
        self.part_floats = tuning.warps * MOST_ROWS * tuning.tiles * TILE
        self.shared_bytes = self.rows.end + 4 * self.part_floats * min(tuning.passes, 2)

    # ---- a unit --------------------------------------------------------------------------------
    def item(self, index):
        """Pass, place in it and unit of the warp's item ``index``."""
        if self.tuning.passes == 1:
            return T.int32(0), index, T.bind(self.warp + index * self.tuning.warps)
        number = T.bind(T.truncdiv(index, self.count))
        at = T.bind(index - number * self.count)
        return number, at, T.bind(self.warp + at * self.tuning.warps)

    def when_there(self, unit, body) -> None:
        """``body()`` if the unit is one."""
        if self.even:
            body()
        else:
            when(unit < self.units, body)

    def tile(self, number, i: int):
        """Tile ``i`` of pass ``number``; one of those there are."""
        first = (self.block * self.tuning.passes + number) * self.run + i % self.run
        whole = self.lines % (self.run * self.tuning.passes) == 0
        tile = T.bind(first if whole else T.min(first, self.lines - 1))
        return T.bind(tile + self.half) if i >= self.run else tile

    def load(self, index, slot: int) -> None:
        """Start loading the lane's words of an item to the place of ``slot``."""
        number, _, unit = self.item(index)

        def load() -> None:
            for i in range(self.tuning.tiles):
                tile, at = self.tile(number, i), (slot * self.tuning.tiles + i) * self.stride
                if self.codes:
                    source = T.bind(self.weight[0].ptr_to([tile, unit, self.lane, 0]))
                    load_global(self.held, at, 4, source, cache=_ONCE)
                    source = T.bind(self.weight[1].ptr_to([tile, unit, T.shift_right(self.c, 1), self.g, 0]))
                    load_global(self.held, at + STEPS, 1, source, cache=_ONCE)
                    continue
                source = T.bind(self.weight[0].ptr_to([tile, unit, 0, self.lane, 0]))
                for step in range(STEPS):
                    load_global(self.held, at + 4 * step, 4, source, 512 * step, cache=_ONCE)

        self.when_there(unit, load)

    def add_unit(self, unit, slot: int) -> None:
        """Add the products of a unit of all tiles."""
        count = self.tuning.tiles
        address = T.bind(self.row_address + T.cast(unit * (2 * UNIT), "uint32"))

        def load_row() -> None:
            for half in range(2):
                load_shared(self.values, 4 * half, 4, address, 16 * half)

        when(self.has_row, load_row)
        sums = self._starts(unit) if self.codes else self.acc
        a = T.alloc_local([4], "uint32")
        for step in range(STEPS):
            b = [self.values[2 * step + i] for i in range(2)]
            for i in range(count):
                at = (slot * count + i) * self.stride
                if self.codes:
                    registers = self.codes.registers(self.held[at + step], a)
                else:
                    registers = [self.held[at + 4 * step + p] for p in range(4)]
                mma(sums, 4 * i, registers, b, dtype=self.dtype)
        if self.codes:
            self._scale(sums, slot)

    def _starts(self, unit):
        """Sums of a unit that start where the codes' center puts them."""
        sums = T.alloc_local([4 * self.tuning.tiles], "float32")
        offsets = T.alloc_local([2], "float32")
        load_shared(offsets, 0, 2, self.offset_address + T.cast(unit * 32, "uint32"), kind="f32")
        for i in range(self.tuning.tiles):
            for y in range(2):
                put(sums, offsets[y], 4 * i + y)
                put(sums, offsets[y] * T.float32(self.codes.second), 4 * i + 2 + y)
        return sums

    def _scale(self, sums, slot: int) -> None:
        """Add the sums of a unit, scaled."""
        word = T.alloc_local([1], "uint32")
        for i in range(self.tuning.tiles):
            put(word, self.held[(slot * self.tuning.tiles + i) * self.stride + STEPS], 0)
            for x in range(2):
                scale = T.bind(T.cast(word.view(self.dtype)[x], "float32"))
                for at in (4 * i + 2 * x, 4 * i + 2 * x + 1):
                    put(self.acc, self.acc[at] + sums[at] * scale, at)

    # ---- a block -------------------------------------------------------------------------------
    def body(self, weight, x, gain, added, out, n, block, thread, shared) -> None:
        """A block's tiles."""
        tuning, ahead = self.tuning, self.ahead
        let_next_start(tuning.overlap)
        self.weight, self.added, self.out, self.n = weight, added, out, n
        self.block, self.thread, self.shared = block, thread, shared
        self.warp, self.lane = T.bind(T.shift_right(thread, 5)), T.bind(T.bitwise_and(thread, WARP - 1))
        self.g, self.c = T.bind(T.shift_right(self.lane, 2)), T.bind(T.bitwise_and(self.lane, 3))
        self.held = T.alloc_local([ahead * tuning.tiles * self.stride], "uint32")
        for slot in range(ahead):
            self.load(T.int32(slot), slot)
        self._begin()
        self.rows.begin(gain, thread, self.base)
        wait_for_rows(tuning.overlap)
        self.load_added(T.int32(0))
        self.rows.fill(x, n)
        with T.serial(-(-self.items // ahead)) as turn:
            for slot in range(ahead):
                index = T.bind(turn * ahead + slot)

                def one(index=index, slot=slot) -> None:
                    number, at, unit = self.item(index)
                    self.when_there(unit, lambda: self.add_unit(unit, slot))
                    following = T.bind(index + ahead)
                    when(following < self.items, lambda: self.load(following, slot))
                    if tuning.passes > 1:
                        when(at == self.count - 1, lambda: self.finish(number))

                if self.items % ahead == 0:
                    one()
                else:
                    when(index < self.items, one)
        if tuning.passes == 1:
            self.finish(T.int32(0))

    def _begin(self) -> None:
        """Where the lane finds its inputs, and its sums."""
        self.base = T.bind(T.cuda.cvta_generic_to_shared(self.shared.data))
        row = T.bind(T.bitwise_and(self.g, MOST_ROWS - 1))
        self.row_address = T.bind(self.base + T.cast(row * self.rows.row_bytes + self.c * 32, "uint32"))
        self.offset_address = T.bind(self.base + T.cast(self.c * 8 + self.rows.offsets_at, "uint32"))
        # a column has a row's inputs of one group; the others stay zeros
        self.has_row = T.bind(T.And(row < self.n, T.shift_right(self.g, 2) == T.shift_right(self.c, 1)))
        self.values = T.alloc_local([8], "uint32")
        for i in range(8):
            put(self.values, u32(0), i)
        self.acc = T.alloc_local([4 * self.tuning.tiles], "float32")
        for i in range(4 * self.tuning.tiles):
            put(self.acc, T.float32(0), i)
        self.extra = T.alloc_local([1], "float32")

    # ---- the end of a pass ---------------------------------------------------------------------
    def ended(self, number):
        """Row, place, output and existence of what the thread ends; of a gated product, the first half's."""
        outputs = self.run * TILE
        row, at = T.bind(T.truncdiv(self.thread, outputs)), T.bind(T.truncmod(self.thread, outputs))
        # sums lie as lanes have them: outputs g and g + 8 are neighbours
        within = T.shift_right(T.bitwise_and(at, TILE - 1), 1) + 8 * T.bitwise_and(at, 1)
        tile = (self.block * self.tuning.passes + number) * self.run + T.shift_right(at, 4)
        output = T.bind(tile * TILE + within)
        return row, at, output, T.And(row < self.n, output < (self.half * TILE or self.n_out))

    def load_added(self, number) -> None:
        """Start loading the residual of what the thread ends."""
        if self.added is None:
            return
        row, _, output, exists = self.ended(number)

        def load() -> None:
            source = T.bind(self.added.ptr_to([row, output]))
            load_global(self.extra, 0, 1, source, kind="f32", cache=".cg")

        when(exists, load)

    def finish(self, number) -> None:
        """Add up the warps' sums of a pass, in order, and store."""
        width, acc = self.tuning.tiles * TILE, self.acc
        first = self.rows.end // 4
        if self.tuning.passes > 1:  # two places take turns: one is read while the other is written
            first = T.bind(first + T.bitwise_and(number, 1) * self.part_floats)
        for i in range(4 * self.tuning.tiles):  # the two groups of inputs
            put(acc, acc[i] + shuffle_xor(acc[i], 2), i)

        def store_parts() -> None:
            for y in range(2):
                line = T.bind(first + (self.warp * MOST_ROWS + 2 * self.c + y) * width + 2 * self.g)
                for i in range(self.tuning.tiles):
                    for x in range(2):
                        put(self.shared, acc[4 * i + 2 * x + y], line + i * TILE + x)

        when(self.c < 2, store_parts)
        for i in range(4 * self.tuning.tiles):
            put(acc, T.float32(0), i)
        block_sync()
        row, at, output, exists = self.ended(number)

        def total(half: int):
            start = T.bind(first + row * width + half * self.run * TILE + at)
            value = self.shared[start]
            for warp in range(1, self.tuning.warps):
                value = value + self.shared[start + warp * MOST_ROWS * width]
            if self.codes is None:
                return T.bind(value)
            unit, second = self.codes.unit, self.codes.unit / self.codes.second
            return T.bind(value * T.Select(T.bitwise_and(at, 1) == 0, T.float32(unit), T.float32(second)))

        def store() -> None:
            value = total(0)
            if self.activation:
                value = activate(value, self.activation) * total(1)
                put_rounded(self.out, value, self.dtype, "", row, output)
                return
            put(self.out, value if self.added is None else self.extra[0] + value, row, output)

        when(exists, store)
        if self.tuning.passes > 1:
            when(number + 1 < self.tuning.passes, lambda: self.load_added(number + 1))


def gates(n_out: int) -> bool:
    """Whether such a product can be gated: each half is a whole number of tiles."""
    return n_out % (2 * TILE) == 0


def fits(kernel: Gemv, archs: Sequence[str]) -> bool:
    """Whether GPUs of every one of ``archs`` have the shared memory."""
    return kernel.shared_bytes <= min(SHARED_KIB.get(arch_number(arch), 99) for arch in archs) << 10


def gemv(kernel: Gemv, residual: bool = False) -> tirx.PrimFunc:
    """Build the product for at most :data:`MOST_ROWS` rows; its arguments are those of ``products.py``."""
    tuning = kernel.tuning

    def body(weight, x, gain, added, out, n):
        with T.attr({"tirx.dyn_smem_bytes": kernel.shared_bytes}):
            block = T.cta_id([kernel.blocks])
            thread = T.thread_id([tuning.threads])
            data = T.alloc_buffer((kernel.shared_bytes,), "uint8", scope="shared.dyn", align=128)
            floats = (kernel.shared_bytes // 4,)
            shared = T.decl_buffer(floats, "float32", data.data, elem_offset=0, scope="shared.dyn")
            kernel.body(weight, x, gain, added, out, T.bind(T.cast(n, "int32")), block, thread, shared)

    return product_func(
        kernel.n_out,
        kernel.rows.k,
        kernel.storage,
        residual,
        kernel_attributes(tuning.overlap),
        body,
        gated=kernel.activation is not None,
        dtype=kernel.dtype,
        rows=kernel.rows.source,
    )
