"""LowerExperts: the choice of each row's experts becomes a kernel.

The products with the experts' matrices are left to ``lower_weights``, which knows how these are stored.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.ir import GlobalVar, IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from kvq.model.experts import ROUTE_EXPERTS
from kvq.schedules.backend import Kernels

from .cache_geometry import callee_of


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, mod: IRModule, kernels: Kernels) -> None:
        super().__init__(mod)
        self.mod, self.backend = mod, kernels
        self.kernels: dict[str, GlobalVar] = {}

    def transform(self) -> IRModule:
        for gv, func in self.mod.functions_items():
            if isinstance(func, relax.Function):
                self.builder_.update_func(gv, self.visit_expr(func))
        return self.builder_.get()

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if callee_of(call) != ROUTE_EXPERTS:
            return call
        logits, normalize = call.args[1].fields
        count, chosen = int(logits.ty.shape[1]), int(call.ty.fields[0].shape[1])
        weighted = bool(int(normalize.value))
        name = f"route_experts_{count}_{chosen}" + ("_normalized" if weighted else "")
        if name not in self.kernels:
            kernel = self.backend.route_experts(count, chosen, weighted)
            self.kernels[name] = self.builder_.add_func(kernel, name)
        types: list[Any] = list(call.ty.fields)
        return relax.call_tir(self.kernels[name], [logits], out_ty=types)


@tvm.transform.module_pass(opt_level=0, name="LowerExperts")
class LowerExperts:
    """The pass.

    Parameters
    ----------
    kernels : Kernels
        The backend.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def transform_module(self, mod: IRModule, _context: tvm.transform.PassContext) -> IRModule:
        """Rewrite ``mod``."""
        return _Rewriter(mod, self.kernels).transform()
