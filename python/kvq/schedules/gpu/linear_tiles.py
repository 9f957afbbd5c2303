"""Products of many rows with a weight, the heart of prefill: tiles in shared memory, blocks in registers.

A workgroup makes a tile of 64 rows by 64 outputs. For 16 inputs at a time it brings the rows and the weights,
as float32, into shared memory, inputs outermost; a thread then multiplies 4 rows by 8 outputs from registers.
Those are runs of four, which may be one load, and neighbouring threads have neighbouring runs. A sum runs
over the inputs in order.
"""

from __future__ import annotations

from functools import partial

from tvm.script import tirx as T

from kvq.schedules.statements import for_threads, put, when

from .block import launch, local, shared, sync
from .stored_weight import VECTOR, StoredWeight

#: Threads of a workgroup, along its outputs and its rows.
OUTPUT_THREADS, ROW_THREADS = 8, 16
#: Outputs and rows of a thread.
OUTPUTS, ROWS = 8, 4
#: Outputs and rows of a tile.
TILE_OUTPUTS, TILE_ROWS = OUTPUT_THREADS * OUTPUTS, ROW_THREADS * ROWS
#: Inputs of a step.
STEP = 16
_THREADS = OUTPUT_THREADS * ROW_THREADS
#: Neighbouring rows or outputs of a thread.
_RUN = 4
#: What a line of a tile has beyond its length: lines start in other banks, and runs where a load of four may.
_PAD = 4


def multiply_tiles(weight: StoredWeight, x, out, rows, k: int, n_out: int) -> None:
    """Launch ``out = x @ w.T`` for ``rows`` (int32 expression) rows."""
    steps, vectors = -(-k // STEP), STEP // VECTOR
    blocks = [-(-n_out // TILE_OUTPUTS), T.truncdiv(rows + (TILE_ROWS - 1), TILE_ROWS)]
    with launch(blocks, _THREADS) as (column, block, thread):
        first_output, first_row = T.bind(column * TILE_OUTPUTS), T.bind(block * TILE_ROWS)
        my_output, my_row = (
            T.bind(T.truncmod(thread, OUTPUT_THREADS)),
            T.bind(T.truncdiv(thread, OUTPUT_THREADS)),
        )

        def row_of(r: int):
            return (r // _RUN * ROW_THREADS + my_row) * _RUN + r % _RUN

        def output_of(o: int):
            return (o // _RUN * OUTPUT_THREADS + my_output) * _RUN + o % _RUN

        inputs = shared((STEP, TILE_ROWS + _PAD), "float32")
        weights = shared((STEP, TILE_OUTPUTS + _PAD), "float32")
        acc = local((ROWS * OUTPUTS,), "float32")
        for i in range(ROWS * OUTPUTS):
            put(acc, T.float32(0), i)
        with T.serial(steps) as step:

            def load_input(i):
                row, at = T.bind(T.truncdiv(i, STEP)), T.bind(T.truncmod(i, STEP))
                source = T.bind(step * STEP + at)
                inside = T.And(source < k, first_row + row < rows)
                put(inputs, T.if_then_else(inside, x[first_row + row, source], T.float32(0)), at, row)

            def load_weights(i):
                output, at = T.bind(T.truncdiv(i, vectors)), T.bind(T.truncmod(i, vectors))
                # beyond the last input the row's inputs are 0, beyond the last output nobody looks
                source = T.bind(T.min(step * vectors + at, k // VECTOR - 1))
                vector = weight.read(T.bind(T.min(first_output + output, n_out - 1)), source)
                for j, value in enumerate(vector.values()):
                    put(weights, value, at * VECTOR + j, output)

            sync()
            for_threads(TILE_ROWS * STEP, thread, _THREADS, load_input)
            for_threads(TILE_OUTPUTS * vectors, thread, _THREADS, load_weights)
            sync()
            with T.serial(STEP) as at:
                mine = [T.bind(inputs[at, row_of(r)]) for r in range(ROWS)]
                numbers = [T.bind(weights[at, output_of(o)]) for o in range(OUTPUTS)]
                for o, number in enumerate(numbers):
                    for r in range(ROWS):
                        put(acc, acc[r * OUTPUTS + o] + mine[r] * number, r * OUTPUTS + o)
        for r in range(ROWS):
            row = T.bind(first_row + row_of(r))
            for o in range(OUTPUTS):
                output = T.bind(first_output + output_of(o))
                when(T.And(row < rows, output < n_out), partial(put, out, acc[r * OUTPUTS + o], row, output))
