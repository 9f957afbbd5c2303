"""FusePointwise: RMS norm and the gated activation as one vectorized kernel each.

``multiply(silu(a), b)`` where a and b are the halves of one ``split`` becomes ``silu_gate``; ``rms_norm`` of
float32 rows becomes our kernel. Everything else is left to Relax's own fusion.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.ir import GlobalVar, IRModule, Op
from tvm.relax.expr_functor import PyExprMutator, mutator

from kvq.schedules.cpu.pointwise import rms_norm, silu_gate
from kvq.schedules.cpu.vector import CpuIsa

_NORM, _SILU = Op.get("relax.nn.rms_norm"), Op.get("relax.nn.silu")
_MULTIPLY, _SPLIT = Op.get("relax.multiply"), Op.get("relax.split")


def _is_rows(ty: Any) -> bool:
    return isinstance(ty, relax.TensorType) and ty.ndim == 2 and str(ty.dtype) == "float32"


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, mod: IRModule, isa: CpuIsa) -> None:
        super().__init__(mod)
        self.mod, self.isa = mod, isa
        self.kernels: dict[str, GlobalVar] = {}

    def transform(self) -> IRModule:
        for gv, func in self.mod.functions_items():
            if isinstance(func, relax.Function):
                self.builder_.update_func(gv, self.visit_expr(func))
        return self.builder_.get()

    def kernel(self, name: str, build: Any) -> GlobalVar:
        if name not in self.kernels:
            self.kernels[name] = self.builder_.add_func(build(), name)
        return self.kernels[name]

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not isinstance(call, relax.Call):
            return call
        if (
            call.op == _NORM
            and _is_rows(call.args[0].ty)
            and [int(a) for a in call.attrs.axes] in ([-1], [1])
        ):
            dim, eps = int(call.args[0].ty.shape[1]), float(call.attrs.epsilon)
            kernel = self.kernel(f"rms_norm_{dim}", lambda: rms_norm(dim, eps, self.isa))
            return relax.call_tir(kernel, list(call.args), out_ty=call.ty)
        if call.op == _MULTIPLY:
            source = self._gated(*call.args)
            if source is not None:
                dim = int(source.ty.shape[1]) // 2
                kernel = self.kernel(f"silu_gate_{dim}", lambda: silu_gate(dim, self.isa))
                return relax.call_tir(kernel, [source], out_ty=call.ty)
        return call

    def _value(self, expr: relax.Expr) -> relax.Expr | None:
        return self.lookup_binding(expr) if isinstance(expr, relax.Var) else None

    def _gated(self, activated: relax.Expr, up: relax.Expr) -> relax.Expr | None:
        """``x`` if the arguments are ``silu(split(x)[0])`` and ``split(x)[1]`` of rows."""
        silu, second = self._value(activated), self._value(up)
        if not (isinstance(silu, relax.Call) and silu.op == _SILU):
            return None
        first = self._value(silu.args[0])
        if not (isinstance(first, relax.TupleGetItem) and isinstance(second, relax.TupleGetItem)):
            return None
        if (first.index, second.index) != (0, 1) or not first.tuple_value.same_as(second.tuple_value):
            return None
        split = self._value(first.tuple_value)
        if not (isinstance(split, relax.Call) and split.op == _SPLIT and _is_rows(split.args[0].ty)):
            return None
        return split.args[0] if len(split.ty.fields) == 2 and int(split.attrs.axis) in (-1, 1) else None


@tvm.transform.module_pass(opt_level=0, name="FusePointwise")
class FusePointwise:
    """The pass.

    Parameters
    ----------
    isa : CpuIsa
        Instructions the kernels may use.
    """

    def __init__(self, isa: CpuIsa) -> None:
        self.isa = isa

    def transform_module(self, mod: IRModule, _context: tvm.transform.PassContext) -> IRModule:
        """Rewrite ``mod``."""
        return _Rewriter(mod, self.isa).transform()
