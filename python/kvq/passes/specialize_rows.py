"""SpecializeRows: copies of the model's functions for steps of few rows, which get kernels of their own.

A backend whose products are other kernels for few rows than for many names the limits. For each limit every
function that takes the weights is copied, ``decode`` to ``decode_16`` and so on; the copy's attribute
:data:`MOST_ROWS` tells LowerWeights. Kernels that do not depend on it are shared.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import IRModule

#: Attribute of a function: the most rows of its steps.
MOST_ROWS = "kvq.most_rows"
#: Functions that run steps.
STEP_FUNCTIONS = ("prefill", "decode")


@tvm.transform.module_pass(opt_level=0, name="SpecializeRows")
class SpecializeRows:
    """The pass.

    Parameters
    ----------
    limits : tuple of int
        ``Kernels.row_limits``.
    """

    def __init__(self, limits: tuple[int, ...]) -> None:
        self.limits = limits

    def transform_module(self, mod: IRModule, _context: tvm.transform.PassContext) -> IRModule:
        """Add the copies."""
        mod = mod.clone()
        for name in STEP_FUNCTIONS:
            for limit in self.limits:
                copy = relax.utils.copy_with_new_vars(mod[name])
                copy = copy.with_attr("global_symbol", f"{name}_{limit}").with_attr(MOST_ROWS, limit)
                mod[f"{name}_{limit}"] = copy
        return mod
