"""Runs: elements side by side that one instruction loads.

A workgroup's memory of which vectors are loaded is an array of such vectors. TVM has no type of its own for
that: what is loaded says it.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.sym import Analyzer

#: Lanes of SPIR-V's vectors that memory is made of.
_LANES = (2, 4)


def run_of(indices: Any) -> tuple[Any, int] | None:
    """Where a vector's elements begin, and how many: None unless they are a run at a multiple of that."""
    index = indices[0] if len(indices) == 1 else None
    if type(index).__name__ != "Ramp" or int(index.lanes) not in _LANES:
        return None
    if type(index.stride).__name__ != "IntImm" or int(index.stride) != 1:
        return None
    known, lanes = Analyzer().modular_set(index.base), int(index.lanes)
    if known.coeff % lanes or known.base % lanes:
        return None
    return index.base, lanes


def loaded_runs(body: Any) -> dict[Any, int]:
    """Lengths of the runs that a kernel loads, by buffer; of several the shortest."""
    found: dict[Any, int] = {}

    def visit(node: Any) -> None:
        if type(node).__name__ == "TensorLoad" and (run := run_of(node.indices)) is not None:
            found[node.source] = min(found.get(node.source, run[1]), run[1])

    tvm_ffi.structural_walk(body, visit)
    return found


def divide(index: Any, lanes: int) -> tuple[Any, Any]:
    """Number of the vector of ``lanes`` in which element ``index`` lies, and its place there: expressions."""
    analyzer = Analyzer()
    vector = analyzer.simplify(tirx.floordiv(index, lanes))
    place = analyzer.simplify(tirx.floormod(index, lanes))
    if not (_floors(vector) or _floors(place)):
        return vector, place
    return tirx.shift_right(index, lanes.bit_length() - 1), tirx.bitwise_and(index, lanes - 1)


def _floors(expr: Any) -> bool:
    """Whether there is a division in it that SPIR-V has not for signed numbers."""
    found = []

    def visit(node: Any) -> None:
        if type(node).__name__ in ("FloorDiv", "FloorMod"):
            found.append(node)

    tvm_ffi.structural_walk(expr, visit)
    return bool(found)
