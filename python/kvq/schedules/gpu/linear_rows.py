"""Products of a few rows with a weight, the heart of decoding: each weight is read once, and coalesced.

Neighbouring threads (*lanes*) share an output's inputs: at each step a lane takes eight of them, from weights
in codes a piece of its own, from others every ``lanes``-th, so that the lanes together read one piece of
memory. The inputs of the rows lie in shared memory in the order in which lanes want them. Partial sums meet
at the end. The order of a sum depends on K and the limits alone, not on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tvm.script import tirx as T

from kvq.schedules.statements import for_threads, put, when

from .block import add, launch, local, reduce_lanes, shared, sync
from .limits import GpuLimits
from .stored_weight import VECTOR, StoredWeight, code_shift

#: Threads of a workgroup, and most lanes of an output.
THREADS, LANES = 256, 32
#: Rows of a workgroup where there are several.
FEW_ROWS = 4
#: Steps of a chunk of inputs in shared memory, by rows of the workgroup.
_STEPS = {1: 8, FEW_ROWS: 2}
#: Steps whose weights are read before those of the first are used.
_AHEAD = {1: 4, FEW_ROWS: 2}
#: Lanes that may stand idle in the last step, as a share of all.
_IDLE = 1 / 8
#: Words between the lines of a chunk in shared memory: fills then hit different banks.
_PAD = 4
#: From how many outputs on a lane makes four of them, not two: enough workgroups fill any GPU.
_MANY_OUTPUTS = 16384


@dataclass(frozen=True)
class RowsTuning:
    """How a product of few rows is cut.

    Attributes
    ----------
    threads : int
        Of a workgroup.
    lanes : int
        Threads that share an output.
    outputs : int
        Outputs of a lane.
    subgroup : int
        As in :class:`~.limits.GpuLimits`.
    """

    threads: int
    lanes: int
    outputs: int
    subgroup: int

    @property
    def block_outputs(self) -> int:
        """Outputs of a workgroup."""
        return self.threads // self.lanes * self.outputs


def rows_tuning(n_out: int, k: int, limits: GpuLimits) -> RowsTuning:
    """The tuning for a weight ``[n_out, k]``: as many lanes as its inputs keep busy."""
    vectors, lanes = k // VECTOR, LANES
    while lanes > VECTOR and -(-vectors // lanes) * lanes > vectors * (1 + _IDLE):
        lanes //= 2
    outputs = 4 if n_out >= _MANY_OUTPUTS else 2
    return RowsTuning(min(THREADS, limits.threads), lanes, outputs, limits.subgroup)


def multiply_rows(
    weight: StoredWeight,
    tuning: RowsTuning,
    rows: int,
    k: int,
    blocks,
    first_weight_row,
    n_out: int,
    input_of,
    store,
) -> None:
    """Launch the product of ``rows`` rows a workgroup with ``n_out`` rows of a weight.

    Parameters
    ----------
    weight : StoredWeight
        The weight.
    tuning : RowsTuning
        How to cut it.
    rows : int
        1 or :data:`FEW_ROWS`.
    k : int
        Inputs.
    blocks : int32 expression
        Workgroups along the rows.
    first_weight_row : callable
        Of the workgroup's number along the rows, the weight's row of output 0.
    n_out : int
        Outputs.
    input_of : callable
        ``(row, column)`` to the input, for a column below K; 0 for a row that is none.
    store : callable
        ``(row, output, value)`` emits the statement that stores a result, if the row is one.
    """
    threads, lanes, outputs = tuning.threads, tuning.lanes, tuning.outputs
    all_steps = -(-k // (VECTOR * lanes))
    steps, ahead = min(_STEPS[rows], all_steps), _AHEAD[rows]
    in_codes = weight.kind.bits is not None
    # what takes out that inputs in shared memory are divided by the shifts of their weights
    shifted = [T.float32(2.0 ** code_shift(weight.kind, i)) for i in range(VECTOR)]
    with launch([-(-n_out // tuning.block_outputs), blocks], threads) as (column, block, thread):
        lane = T.bind(T.truncmod(thread, lanes))
        first_output = T.bind((column * (threads // lanes) + T.truncdiv(thread, lanes)) * outputs)
        first_row, base = T.bind(block * rows), first_weight_row(block)
        weight_rows = [T.bind(base + T.min(first_output + o, n_out - 1)) for o in range(outputs)]
        tile = shared((rows, steps, VECTOR, lanes + (_PAD if in_codes else 0)), "float32")
        acc = local((rows * outputs,), "float32")
        for i in range(rows * outputs):
            put(acc, T.float32(0), i)

        def fill(first_step, count: int) -> None:
            """The rows' inputs of ``count`` steps, 0 beyond the last, where the lanes want them."""
            width = count * VECTOR * lanes

            def load(i):
                row, at = T.bind(T.truncdiv(i, width)), T.bind(T.truncmod(i, width))
                if in_codes:
                    number, owner = T.truncmod(at, VECTOR), T.truncmod(T.truncdiv(at, VECTOR), lanes)
                else:
                    number, owner = T.truncmod(T.truncdiv(at, lanes), VECTOR), T.truncmod(at, lanes)
                source = first_step * (VECTOR * lanes) + at
                value = T.if_then_else(source < k, input_of(first_row + row, source), T.float32(0))
                if in_codes:
                    value = value * _power_of_two(0 - code_shift(weight.kind, number))
                put(tile, value, row, T.truncdiv(at, VECTOR * lanes), number, owner)

            for_threads(rows * width, thread, threads, load)

        def read(step):
            """The lane's weights of a step, for each of its outputs."""
            if in_codes:  # beyond the last input the row's inputs are 0
                vector = T.bind(T.min(step * lanes + lane, k // VECTOR - 1))
                return [weight.read(row, vector) for row in weight_rows]
            first = T.bind(step * (lanes * VECTOR) + lane)
            return [weight.read_apart(row, first, lanes) for row in weight_rows]

        def multiply(at: int, vectors) -> None:
            """Add the products of a step of the chunk."""
            vectors = [vector.bound() for vector in vectors]
            for r in range(rows):
                x = [T.bind(tile[r, at, i, lane]) for i in range(VECTOR)]
                inputs = None
                if weight.offsets is not None:
                    inputs = T.bind(_sum_of_products(x, shifted))
                for o, vector in enumerate(vectors):
                    product = _sum_of_products(x, vector.numbers)
                    if vector.scale is not None:
                        product = product * vector.scale
                    if vector.minimum is not None:
                        product = product + inputs * vector.minimum
                    put(acc, acc[r * outputs + o] + product, r * outputs + o)

        def chunk(first_step, count: int) -> None:
            """``count`` steps; weights are on their way while the inputs come, and then a few ahead."""
            for start in range(0, count, ahead):
                group = range(start, min(start + ahead, count))
                vectors = [read(first_step + at) for at in group]
                if start == 0:
                    sync()
                    fill(first_step, count)
                    sync()
                for at, found in zip(group, vectors, strict=True):
                    multiply(at, found)

        whole, left = divmod(all_steps, steps)
        with T.serial(whole) as number:
            chunk(number * steps, steps)
        if left:
            chunk(whole * steps, left)
        sums = shared((outputs, threads), "float32")
        for r in range(rows):
            for o in range(outputs):
                put(sums, acc[r * outputs + o], o, thread)
            reduce_lanes(add, sums, outputs, thread, lanes, tuning.subgroup)

            def finish(r=r):
                for o in range(outputs):
                    value, output = sums[o, thread], first_output + o
                    when(output < n_out, partial(store, first_row + r, output, value))

            when(lane == 0, finish)


def _power_of_two(exponent):
    """``2**exponent`` for an int32 expression in the range of float32."""
    return T.reinterpret("float32", T.shift_left(exponent + 127, 23))


def _sum_of_products(values, factors):
    total = values[0] * factors[0]
    for value, factor in zip(values[1:], factors[1:], strict=True):
        total = total + value * factor
    return total
