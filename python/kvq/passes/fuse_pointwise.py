"""FusePointwise: what stands between two matrix products becomes one kernel, or none.

- ``rms_norm`` of float32 rows, and ``multiply(act(a), b)`` where a and b are the halves of one ``split`` and
  ``act`` is ``silu`` or ``gelu_tanh``, become our kernels;
- ``quantize_rows`` of such a kernel's result becomes part of it; where the backend has that, a gate and what
  rounds it become part of the product before;
- what rounds the rows of a product, or normalizes and rounds them, becomes part of the product where the
  backend has that and nobody else takes these rows;
- the addition of a residual to a product of rounded activations becomes part of the product;
- a reshape of a reshape becomes one.

Everything else is left to Relax's own fusion.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.ir import GlobalVar, IRModule, Op
from tvm.relax.expr_functor import PyExprMutator, mutator

from kvq.schedules.backend import Kernels, RowSource

from .rounded_product import RoundedProduct, float_name, rounding_name, rounding_order

_NORM = Op.get("relax.nn.rms_norm")
#: Activations of a gate, by their operators.
_ACTIVATIONS = {Op.get(f"relax.nn.{name}"): name for name in ("silu", "gelu_tanh")}
_MULTIPLY, _SPLIT = Op.get("relax.multiply"), Op.get("relax.split")
_ADD, _RESHAPE = Op.get("relax.add"), Op.get("relax.reshape")
_CALL_TIR = Op.get("relax.call_tir")


def _is_rows(ty: Any) -> bool:
    return isinstance(ty, relax.TensorType) and ty.ndim == 2 and str(ty.dtype) == "float32"


def _is_kernel(expr: Any, prefix: str) -> bool:
    """Whether ``expr`` is ``call_tir`` of a kernel whose name starts with ``prefix``."""
    return isinstance(expr, relax.Call) and expr.op == _CALL_TIR and expr.args[0].name_hint.startswith(prefix)


def _count_uses(func: relax.Function) -> dict[relax.Var, int]:
    """How many bindings of the function use each variable; its result counts as one."""
    uses: dict[relax.Var, int] = {}
    body = func.body
    values = [binding.value for block in body.blocks for binding in block.bindings]
    for value in [*values, body.body]:
        for var in relax.analysis.free_vars(value):
            uses[var] = uses.get(var, 0) + 1
    return uses


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, mod: IRModule, kernels: Kernels) -> None:
        super().__init__(mod)
        self.mod, self.backend = mod, kernels
        self.kernels: dict[str, GlobalVar] = {}
        #: builders of the quantizing variants from the order of rows, by the name of the plain kernel
        self.quantizing: dict[str, Any] = {}
        #: what a product may do itself of what makes its rows, by the name of the kernel that does it
        self.sources: dict[str, RowSource] = {}
        #: products that make their rows, by the names of their kernels
        self.products: dict[str, RoundedProduct] = {}
        self.uses: dict[relax.Var, int] = {}

    def transform(self) -> IRModule:
        for gv, func in self.mod.functions_items():
            if isinstance(func, relax.Function):
                self.uses = _count_uses(func)
                self.builder_.update_func(gv, self.visit_expr(func))
        return self.builder_.get()

    def kernel(self, name: str, build: Any) -> GlobalVar:
        if name not in self.kernels:
            self.kernels[name] = self.builder_.add_func(build(), name)
        return self.kernels[name]

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        once = [self._once(arg) for arg in call.args]
        rows_once = _is_kernel(call, "linear_") and self._once(call.args[1].fields[0])
        call = super().visit_call_(call)
        if not isinstance(call, relax.Call):
            return call
        if (
            call.op == _NORM
            and _is_rows(call.args[0].ty)
            and [int(a) for a in call.attrs.axes] in ([-1], [1])
        ):
            return self.norm(call)
        if call.op == _MULTIPLY:
            return self.gate(call)
        if call.op == _ADD and _is_rows(call.ty) and once[1]:
            return self.residual(call)
        if _is_kernel(call, "quantize_rows_"):
            return self.quantize(call, rounding_order(call.args[0].name_hint))
        if rows_once:
            return self.make_rows(call)
        if call.op == _RESHAPE:
            inner = self._value(call.args[0])
            if isinstance(inner, relax.Call) and inner.op == _RESHAPE:
                return relax.op.reshape(inner.args[0], call.args[1])
        return call

    def norm(self, call: relax.Call) -> relax.Expr:
        dim, eps = int(call.args[0].ty.shape[1]), float(call.attrs.epsilon)
        name = f"rms_norm_{dim}_{float_name(eps)}"
        if rounded := self.backend.rounded:
            self.quantizing[name] = lambda order: rounded.rms_norm(dim, eps, order)
            self.sources[f"{name}_quantize"] = RowSource(rounded=False, eps=eps)
        kernel = self.kernel(name, lambda: self.backend.rms_norm(dim, eps))
        return relax.call_tir(kernel, list(call.args), out_ty=call.ty)

    def gate(self, call: relax.Call) -> relax.Expr:
        found = self._gated(*call.args)
        if found is None:
            return call
        source, activation = found
        dim = int(source.ty.shape[1]) // 2
        name = f"{activation}_gate_{dim}"
        if rounded := self.backend.rounded:
            self.quantizing[name] = lambda order: rounded.gate(dim, activation, order)
        kernel = self.kernel(name, lambda: self.backend.gate(dim, activation))
        return relax.call_tir(kernel, [source], out_ty=call.ty)

    def quantize(self, call: relax.Call, order: str) -> relax.Expr:
        """``quantize_rows(kernel(...))`` to the quantizing variant of the kernel."""
        inner = self._value(call.args[1].fields[0])
        if not (_is_kernel(inner, "") and inner.args[0].name_hint in self.quantizing):
            return call
        name = inner.args[0].name_hint
        if product := self.gated_product(inner, name, order):
            return relax.call_tir(*product, out_ty=call.ty)
        quantizing = f"{name}_quantize" + (f"_{order}" if order else "")
        kernel = self.kernel(quantizing, lambda: self.quantizing[name](order))
        return relax.call_tir(kernel, list(inner.args[1].fields), out_ty=call.ty)

    def product(self, expr: Any) -> RoundedProduct | None:
        """The product of rounded activations that ``expr`` is, if it is one without a residual."""
        rounded = self.backend.rounded
        if rounded is None or not _is_kernel(expr, ""):
            return None
        name = expr.args[0].name_hint
        return self.products.get(name) or RoundedProduct.parse(name, rounded.name)

    def make_rows(self, call: relax.Call) -> relax.Expr:
        """``linear(rounding(x), ...)`` to a product of ``x``, if there is one."""
        rounding, product = self._value(call.args[1].fields[0]), self.product(call)
        rounded = self.backend.rounded
        if rounded is None or product is None or not _is_kernel(rounding, ""):
            return call
        maker = rounding.args[0].name_hint
        plain = RowSource(rounded=False) if maker == rounding_name(product.k, "") else None
        if (source := self.sources.get(maker, plain)) is None:
            return call
        product = product.with_rows(source)
        name = product.kernel_name()
        if name not in self.kernels:
            built = rounded.linear(
                product.n, product.k, product.storage, most_rows=product.most_rows, rows=source
            )
            if built is None:
                return call
            self.kernel(name, lambda: built)
            self.products[name] = product
        arguments = [*rounding.args[1].fields, *call.args[1].fields[1:]]
        return relax.call_tir(self.kernels[name], arguments, out_ty=call.ty)

    def gated_product(self, gate: relax.Call, name: str, order: str) -> tuple[GlobalVar, list[Any]] | None:
        """The product whose result ``gate`` takes, with gate and rounding in it, and its arguments."""
        activation, found, _ = name.partition("_gate_")
        before, rounded = self._value(gate.args[1].fields[0]), self.backend.rounded
        product = self.product(before)
        if not (found and rounded and product):
            return None
        kernel_name = f"{activation}_gated_{product.kernel_name()}"
        if kernel_name not in self.kernels:
            built = rounded.gated_linear(
                product.n, product.k, product.storage, activation, order, product.most_rows, product.rows
            )
            if built is None:
                return None
            self.kernel(kernel_name, lambda: built)
        return self.kernels[kernel_name], list(before.args[1].fields)

    def residual(self, call: relax.Call) -> relax.Expr:
        """``add(x, linear(...))`` of rounded activations to ``linear_add(..., x)``."""
        inner, x, rounded = self._value(call.args[1]), call.args[0], self.backend.rounded
        product = self.product(inner)
        if rounded is None or product is None or not _is_rows(x.ty):
            return call
        kernel = self.kernel(
            product.with_residual().kernel_name(),
            lambda: rounded.linear(
                product.n,
                product.k,
                product.storage,
                residual=True,
                most_rows=product.most_rows,
                rows=product.rows,
            ),
        )
        return relax.call_tir(kernel, [*inner.args[1].fields, x], out_ty=call.ty)

    def _once(self, expr: Any) -> bool:
        """Whether ``expr`` is a variable that one binding uses."""
        return isinstance(expr, relax.Var) and self.uses.get(expr) == 1

    def _value(self, expr: relax.Expr) -> Any:
        return self.lookup_binding(expr) if isinstance(expr, relax.Var) else None

    def _gated(self, activated: relax.Expr, up: relax.Expr) -> tuple[relax.Expr, str] | None:
        """``x`` and ``act`` if the arguments are ``act(split(x)[0])`` and ``split(x)[1]`` of rows."""
        act, second = self._value(activated), self._value(up)
        if not (isinstance(act, relax.Call) and act.op in _ACTIVATIONS):
            return None
        first = self._value(act.args[0])
        if not (isinstance(first, relax.TupleGetItem) and isinstance(second, relax.TupleGetItem)):
            return None
        if (first.index, second.index) != (0, 1) or not first.tuple_value.same_as(second.tuple_value):
            return None
        split = self._value(first.tuple_value)
        if not (isinstance(split, relax.Call) and split.op == _SPLIT and _is_rows(split.args[0].ty)):
            return None
        halves = len(split.ty.fields) == 2 and int(split.attrs.axis) in (-1, 1)
        return (split.args[0], _ACTIVATIONS[act.op]) if halves else None


@tvm.transform.module_pass(opt_level=0, name="FusePointwise")
class FusePointwise:
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
