"""BoundRows: how many rows a step has at most, for the planner of memory between kernels.

What depends on the number of rows then has the storage of the largest step: every step takes the same pieces
from TVM's pool, which keeps each size that it ever gave, and what they come to is known beforehand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import tvm
from tvm import relax, tirx
from tvm.ir import IRModule

from .specialize_rows import MOST_ROWS, STEP_FUNCTIONS

#: TVM's pool gives whole pages of so many bytes.
_POOL_PAGE = 4096
_BOUNDS = "tir_var_upper_bound"
_PLAN_RESULTS = "relax.memory_plan_dynamic_func_output"


@tvm.transform.module_pass(opt_level=0, name="BoundRows")
class BoundRows:
    """The pass.

    Parameters
    ----------
    most_rows : dict of str to int
        Of ``prefill`` and of ``decode``. How many logits ``prefill`` is asked for has no bound.
    """

    def __init__(self, most_rows: dict[str, int]) -> None:
        self.most_rows = most_rows

    def transform_module(self, mod: IRModule, _context: tvm.transform.PassContext) -> IRModule:
        """Annotate the functions that run steps."""
        mod = mod.clone()
        for gv, func in list(mod.functions.items()):
            kind = step_kind(gv.name_hint)
            if kind is None:
                continue
            (rows,) = (size for size in func.params[0].ty.shape if isinstance(size, tirx.Var))
            most = self.most_rows[kind]
            if MOST_ROWS in func.attrs:
                most = min(most, int(func.attrs[MOST_ROWS]))
            func = func.with_attr(_BOUNDS, {rows.name: most})
            mod[gv] = func.with_attr(_PLAN_RESULTS, True) if kind == "decode" else func
        return mod


def step_kind(name: str) -> str | None:
    """``prefill`` or ``decode`` of a function's name such as ``decode_16``; None for others."""
    return next((kind for kind in STEP_FUNCTIONS if name.partition("_")[0] == kind), None)


def step_storage_bytes(mod: IRModule) -> int:
    """Bytes of the pool when every kind of step has run once, from a module whose memory is planned.

    Functions take turns, so storage of the same size serves all of them. What depends on how many logits are
    asked for is not in it.
    """
    most: Counter[int] = Counter()
    for gv, func in mod.functions.items():
        if step_kind(gv.name_hint) is not None:
            most |= Counter(-(-size // _POOL_PAGE) * _POOL_PAGE for size in _storage_sizes(func))
    return sum(size * times for size, times in most.items())


def _storage_sizes(func: relax.Function) -> Iterator[int]:
    """Bytes of each piece that a function takes from the pool, of those that are numbers."""
    for block in func.body.blocks:
        for binding in block.bindings:
            call = binding.value
            if isinstance(call, relax.Call) and call.op == _ALLOC_STORAGE:
                shape = call.args[0]
                if isinstance(shape, relax.ShapeExpr) and isinstance(shape[0], tirx.IntImm):
                    yield int(shape[0])


_ALLOC_STORAGE = tvm.ir.Op.get("relax.vm.alloc_storage")
