"""LowerWeights: from float32 weights to the stored ones, in the layout that the kernels read.

The module takes all its weights as one tuple. This pass replaces that tuple by the tensors of the weight
scheme, prepared for the kernels, and

- ``matmul(x, permute_dims(w))`` becomes a product with the stored weight: with activations quantized to int8
  per group of 32, or exact;
- ``take(w, ids)`` reads rows of the stored weight;
- a vector (norm, bias) stays float32.

It also adds one ``prepare_*`` function per kind of stored tensor, which the runtime calls once at load, and
returns the list that tells it how.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax
from tvm.ir import GlobalVar, IRModule, Op
from tvm.relax.expr_functor import PyExprMutator, mutator

from kvq.errors import CompileError
from kvq.quantization.scheme import WeightScheme
from kvq.quantization.weights import stored_names
from kvq.schedules.cpu import activations, linear, weight_blocks
from kvq.schedules.cpu.vector import CpuIsa

_MATMUL, _TRANSPOSE, _TAKE = (Op.get(f"relax.{name}") for name in ("matmul", "permute_dims", "take"))


@dataclass(frozen=True)
class PreparedTensor:
    """A tensor of the library's parameter tuple, and how it comes from stored ones.

    Attributes
    ----------
    name, shape, dtype
        The tensor.
    function : str
        Function of the library that makes it.
    source : str
        Stored tensor that the function takes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    function: str
    source: str

    def to_dict(self) -> dict[str, Any]:
        """The entry of the metadata's ``params``."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "function": self.function,
            "inputs": [self.source],
        }


@dataclass
class WeightPlan:
    """How every weight of a model is stored and prepared.

    Attributes
    ----------
    tensors : list of PreparedTensor
        In the order of the parameter tuple.
    index : list of tuple of int
        For each weight of the model, its places in ``tensors``.
    prepare : dict
        Of each ``prepare_*`` function: its PrimFunc, the type it takes and the type it makes.
    """

    scheme: WeightScheme
    tensors: list[PreparedTensor] = field(default_factory=list)
    index: list[tuple[int, ...]] = field(default_factory=list)
    prepare: dict[str, tuple[Any, relax.TensorType, relax.TensorType]] = field(default_factory=dict)

    def add(self, name: str, shape: tuple[int, ...]) -> None:
        """Append a weight of the model."""
        if len(shape) == 1:
            self._add_tensors([self._vector(name, shape[0])])
            return
        n, k = shape
        if self.scheme.bits is None:
            self._add_tensors([self._blocks(name, n, k, self.scheme.dtype)])
        else:
            codes, scales = stored_names(name, True)
            self._add_tensors(
                [self._codes(codes, n, k), self._blocks(scales, n, k // weight_blocks.GROUP, "float16")]
            )

    def _add_tensors(self, tensors: list[PreparedTensor]) -> None:
        start = len(self.tensors)
        self.tensors += tensors
        self.index.append(tuple(range(start, start + len(tensors))))

    def _prepared(
        self, name: str, function: str, build: Any, raw: tuple[Any, str], out: tuple[Any, str]
    ) -> PreparedTensor:
        """The tensor ``function(name)``; ``raw`` and ``out`` are shape and dtype before and after."""
        if function not in self.prepare:
            self.prepare[function] = (build(), relax.TensorType(*raw), relax.TensorType(*out))
        return PreparedTensor(name, out[0], out[1], function, name)

    def _vector(self, name: str, n: int) -> PreparedTensor:
        dtype = self.scheme.dtype
        return self._prepared(
            name,
            f"prepare_vector_{n}",
            lambda: weight_blocks.prepare_vector(n, dtype),
            ((n,), dtype),
            ((n,), "float32"),
        )

    def _blocks(self, name: str, n: int, columns: int, dtype: str) -> PreparedTensor:
        return self._prepared(
            name,
            f"prepare_blocks_{n}x{columns}_{dtype}",
            lambda: weight_blocks.prepare_blocks(n, columns, dtype),
            ((n, columns), dtype),
            ((weight_blocks.num_blocks(n), columns, weight_blocks.BLOCK), dtype),
        )

    def _codes(self, name: str, n: int, k: int) -> PreparedTensor:
        return self._prepared(
            name,
            f"prepare_codes_{n}x{k}",
            lambda: weight_blocks.prepare_int4_codes(n, k),
            ((n, k // 8), "uint32"),
            ((weight_blocks.num_blocks(n), k // weight_blocks.GROUP, 4, weight_blocks.BLOCK), "uint32"),
        )


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, mod: IRModule, plan: WeightPlan, exact: bool, isa: CpuIsa) -> None:
        super().__init__(mod)
        self.mod, self.plan, self.exact, self.isa = mod, plan, exact, isa
        self.kernels: dict[str, GlobalVar] = {}
        self.packed: relax.Var | None = None
        self.new_packed: relax.Var | None = None
        #: weight that a variable of the function stands for, as it is or transposed
        self.weights: dict[relax.Var, int] = {}
        self.transposed: dict[relax.Var, int] = {}

    def transform(self) -> IRModule:
        for gv, func in self.mod.functions_items():
            if isinstance(func, relax.Function):
                self.builder_.update_func(gv, self.rewrite(func))
        mod = self.builder_.get()
        for name, (kernel, raw, out) in self.plan.prepare.items():
            mod = _add_prepare(mod, name, kernel, raw, out)
        return mod

    def kernel(self, name: str, build: Any) -> GlobalVar:
        if name not in self.kernels:
            self.kernels[name] = self.builder_.add_func(build(), name)
        return self.kernels[name]

    def rewrite(self, func: relax.Function) -> relax.Function:
        packed = [
            p
            for p in func.params
            if isinstance(p.ty, relax.TupleType) and len(p.ty.fields) == len(self.plan.index)
        ]
        if not packed:
            return func
        self.packed = packed[0]
        types = [relax.TensorType(t.shape, t.dtype) for t in self.plan.tensors]
        self.new_packed = relax.Var("packed_params", relax.TupleType(types))
        self.weights, self.transposed = {}, {}
        params = [self.new_packed if p.same_as(self.packed) else p for p in func.params]
        body = self.visit_expr(func.body)
        new = relax.Function(params, body, None, is_pure=func.is_pure)
        for key, value in (func.attrs or {}).items():
            new = new.with_attr(key, value)
        return new

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        var, value = binding.var, binding.value
        if isinstance(value, relax.TupleGetItem) and self._is_packed(value.tuple_value):
            places = self.plan.index[value.index]
            if len(var.ty.shape) == 1:
                new = self.builder_.emit(relax.TupleGetItem(self.new_packed, places[0]))
                self.set_var_remap(var.vid if hasattr(var, "vid") else var, new)
            else:
                self.weights[var] = value.index
            return
        if isinstance(value, relax.Call) and value.op == _TRANSPOSE and value.args[0] in self.weights:
            self.transposed[var] = self.weights[value.args[0]]
            return
        super().visit_var_binding_(binding)

    def _is_packed(self, expr: relax.Expr) -> bool:
        return self.packed is not None and expr.same_as(self.packed)

    def visit_var_(self, var: relax.Var) -> relax.Expr:
        if var in self.weights or var in self.transposed:
            raise CompileError(f"weight {var.name_hint} is used in a way that cannot be compiled")
        return super().visit_var_(var)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if call.op == _MATMUL and call.args[1] in self.transposed:
            return self.linear(self.visit_expr(call.args[0]), self.transposed[call.args[1]], call.ty)
        if call.op == _TAKE and call.args[0] in self.weights:
            return self.embedding(self.visit_expr(call.args[1]), self.weights[call.args[0]], call.ty)
        return super().visit_call_(call)

    def stored(self, weight: int) -> list[relax.Var]:
        emit = self.builder_.emit
        return [emit(relax.TupleGetItem(self.new_packed, place)) for place in self.plan.index[weight]]

    @property
    def kind(self) -> str:
        return "int4" if self.plan.scheme.bits else self.plan.scheme.dtype

    def linear(self, x: relax.Expr, weight: int, out: relax.TensorType) -> relax.Expr:
        n, k = int(out.shape[-1]), int(x.ty.shape[-1])
        rows, isa, emit = x.ty.shape[0], self.isa, self.builder_.emit
        if len(out.shape) != 2:
            raise CompileError("a matrix product must have two dimensions")
        if self.exact or self.plan.scheme.bits is None:
            name = f"linear_{self.kind}_{n}x{k}"
            kernel = self.kernel(name, lambda: linear.linear_float(n, k, self.kind, isa))
            return relax.call_tir(kernel, [x, *self.stored(weight)], out_ty=out)
        row_type = relax.TensorType((rows, activations.quantized_width(k)), "int32")
        quantize = self.kernel(f"quantize_rows_{k}", lambda: activations.quantize_rows(k, isa))
        quantized = emit(relax.call_tir(quantize, [x], out_ty=row_type))
        kernel = self.kernel(f"linear_int8_{n}x{k}", lambda: linear.linear_int8(n, k, isa))
        return relax.call_tir(kernel, [quantized, *self.stored(weight)], out_ty=out)

    def embedding(self, ids: relax.Expr, weight: int, out: relax.TensorType) -> relax.Expr:
        tensor = self.plan.tensors[self.plan.index[weight][0]]
        rows, k = tensor.shape[0] * weight_blocks.BLOCK, int(out.shape[-1])
        name = f"embedding_{self.kind}_{rows}x{k}"
        kernel = self.kernel(name, lambda: weight_blocks.embedding(rows, k, self.kind, self.isa))
        return relax.call_tir(kernel, [ids, *self.stored(weight)], out_ty=out)


def _add_prepare(
    mod: IRModule, name: str, kernel: Any, raw_type: relax.TensorType, out_type: relax.TensorType
) -> IRModule:
    """Add the Relax function ``name(raw)`` that calls ``kernel``."""
    bb = relax.BlockBuilder(mod)
    raw = relax.Var("raw", raw_type)
    with bb.function(name, [raw]):
        gv = bb.add_func(kernel, f"{name}_kernel")
        bb.emit_func_output(bb.emit(relax.call_tir(gv, [raw], out_ty=out_type)))
    return bb.get()


@tvm.transform.module_pass(opt_level=0, name="LowerWeights")
class LowerWeights:
    """The pass.

    Parameters
    ----------
    plan : WeightPlan
        Every weight of the module, in the order of its tuple.
    exact : bool
        Compute with the activations as they are, not quantized to int8.
    isa : CpuIsa
        Instructions the kernels may use.
    """

    def __init__(self, plan: WeightPlan, exact: bool, isa: CpuIsa) -> None:
        self.plan, self.exact, self.isa = plan, exact, isa

    def transform_module(self, mod: IRModule, _context: tvm.transform.PassContext) -> IRModule:
        """Rewrite ``mod``."""
        return _Rewriter(mod, self.plan, self.exact, self.isa).transform()
