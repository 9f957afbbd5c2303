"""LowerWeights: from float32 weights to the stored ones, in the layout that the kernels read.

The module takes all its weights as one tuple. This pass replaces that tuple by the tensors of the weight
scheme, prepared for the kernels, and

- ``matmul(x, permute_dims(w))`` becomes a product with the stored weight: with activations rounded, to
  int8 per group of 32 or to fp16, where the backend has such a product, or exact;
- ``take(w, ids)`` reads rows of the stored weight;
- a product of each row with its experts' matrices (:mod:`kvq.model.experts`) becomes one with the stored
  ones, activations exact;
- a vector (norm, bias) stays float32.

It also adds one ``prepare_*`` function per kind of stored tensor, which the runtime calls once at load, and
returns the list that tells it how.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GlobalVar, IRModule, Op
from tvm.relax.expr_functor import PyExprMutator, mutator

from kvq.errors import CompileError
from kvq.model.experts import EXPERT_LINEAR
from kvq.quantization.weights import StoredTensor, stored_tensors
from kvq.schedules.backend import Kernels, Preparation

from .cache_geometry import callee_of
from .rounded_product import RoundedProduct, rounding_name
from .specialize_rows import MOST_ROWS

_MATMUL, _TRANSPOSE, _TAKE = (Op.get(f"relax.{name}") for name in ("matmul", "permute_dims", "take"))


@dataclass(frozen=True)
class PreparedTensor:
    """A tensor of the library's parameter tuple, and how it comes from stored ones.

    Attributes
    ----------
    name, shape, dtype
        The tensor.
    function : str or None
        Function of the library that makes it; None: it is the stored tensor.
    source : str
        Stored tensor that the function takes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    function: str | None
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
    kernels : Kernels
        The backend, which says how it wants stored tensors.
    tensors : list of PreparedTensor
        In the order of the parameter tuple.
    index : list of tuple of int
        For each weight of the model, its places in ``tensors``.
    prepare : dict
        Of each ``prepare_*`` function: its PrimFunc, the type it takes and the type it makes.
    """

    kernels: Kernels
    tensors: list[PreparedTensor] = field(default_factory=list)
    index: list[tuple[int, ...]] = field(default_factory=list)
    prepare: dict[str, tuple[Any, relax.TensorType, relax.TensorType]] = field(default_factory=dict)
    _shapes: list[tuple[int, ...]] = field(default_factory=list)
    _storages: list[str] = field(default_factory=list)

    def add(self, name: str, shape: tuple[int, ...], storage: str, of_experts: bool = False) -> None:
        """Append a weight of the model, stored as a key of :data:`~kvq.quantization.storage.STORAGES`.

        ``of_experts`` says that it holds the matrices of all experts of a layer.
        """
        self._shapes.append(shape)
        self._storages.append(storage)
        as_stored = of_experts and not self.kernels.prepares_experts
        self._add_tensors(
            [
                self._tensor(tensor, None if as_stored else self._preparation(tensor, shape, storage))
                for tensor in stored_tensors(name, shape, storage)
            ]
        )

    def shape(self, weight: int) -> tuple[int, ...]:
        """Shape of the model's weight number ``weight``."""
        return self._shapes[weight]

    def storage(self, weight: int) -> str:
        """How it is stored."""
        return self._storages[weight]

    def activations(self) -> str:
        """What products round activations to where the backend has such products; ``float32``: nowhere."""
        rounded = self.kernels.rounded
        matrices = [(s, kind) for s, kind in zip(self._shapes, self._storages, strict=True) if len(s) > 1]
        if rounded is None or not any(rounded.takes(shape[1], storage) for shape, storage in matrices):
            return "float32"
        return rounded.activations

    def _preparation(self, tensor: StoredTensor, shape: tuple[int, ...], storage: str) -> Preparation | None:
        if len(shape) == 1:
            return self.kernels.prepare_vector(shape[0], tensor.dtype)
        n, columns = tensor.shape
        if tensor.dtype == "uint32" and columns * 8 == shape[1]:
            return self.kernels.prepare_codes(n, shape[1], storage)
        return self.kernels.prepare_matrix(n, columns, tensor.dtype, storage)

    def _add_tensors(self, tensors: list[PreparedTensor]) -> None:
        start = len(self.tensors)
        self.tensors += tensors
        self.index.append(tuple(range(start, start + len(tensors))))

    def _tensor(self, stored: StoredTensor, how: Preparation | None) -> PreparedTensor:
        """The parameter that a stored tensor becomes."""
        name, shape, dtype = stored.name, stored.shape, stored.dtype
        if how is None:
            return PreparedTensor(name, shape, dtype, None, name)
        if how.name not in self.prepare:
            types = relax.TensorType(shape, dtype), relax.TensorType(how.shape, how.dtype)
            self.prepare[how.name] = (how.build(), *types)
        return PreparedTensor(name, how.shape, how.dtype, how.name, name)


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, mod: IRModule, plan: WeightPlan, exact: bool) -> None:
        super().__init__(mod)
        self.mod, self.plan, self.exact, self.backend = mod, plan, exact, plan.kernels
        self.kernels: dict[str, GlobalVar] = {}
        self.packed: relax.Var | None = None
        self.new_packed: relax.Var | None = None
        #: weight that a variable of the function stands for, as it is or transposed
        self.weights: dict[relax.Var, int] = {}
        self.transposed: dict[relax.Var, int] = {}
        #: most rows of the function's steps, and their number in it
        self.most_rows: int | None = None
        self.step_rows: tirx.PrimExpr | None = None

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
        most_rows = (func.attrs or {}).get(MOST_ROWS)
        self.most_rows, self.step_rows = None if most_rows is None else int(most_rows), None
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
        if callee_of(call) == EXPERT_LINEAR:
            x, weight, experts = call.args[1].fields
            return self.expert_linear(x, self.weights[weight], experts, call.ty)
        return super().visit_call_(call)

    def stored(self, weight: int) -> list[relax.Var]:
        emit = self.builder_.emit
        return [emit(relax.TupleGetItem(self.new_packed, place)) for place in self.plan.index[weight]]

    def limit(self, rows: tirx.PrimExpr) -> int | None:
        """Most rows of a product, where that is known; another number of rows than the step's is small."""
        if self.step_rows is None:
            self.step_rows = rows
        if tvm_ffi.structural_equal(rows, self.step_rows):
            return self.most_rows
        return self.most_rows or max(self.backend.row_limits, default=None)

    def linear(self, x: relax.Expr, weight: int, out: relax.TensorType) -> relax.Expr:
        n, k, storage = int(out.shape[-1]), int(x.ty.shape[-1]), self.plan.storage(weight)
        rows, emit, rounded = x.ty.shape[0], self.builder_.emit, self.backend.rounded
        if len(out.shape) != 2:
            raise CompileError("a matrix product must have two dimensions")
        if self.exact or rounded is None or not rounded.takes(k, storage):
            name = f"linear_{storage}_{n}x{k}"
            kernel = self.kernel(name, lambda: self.backend.linear(n, k, storage))
            return relax.call_tir(kernel, [x, *self.stored(weight)], out_ty=out)
        width, dtype = rounded.row_type(k)
        limit = self.limit(rows)
        order = rounded.row_order(limit)
        quantize = self.kernel(rounding_name(k, order), lambda: rounded.quantize_rows(k, order))
        quantized = emit(relax.call_tir(quantize, [x], out_ty=relax.TensorType((rows, width), dtype)))
        name = RoundedProduct(rounded.name, storage, n, k, limit).kernel_name()
        kernel = self.kernel(name, lambda: rounded.linear(n, k, storage, most_rows=limit))
        return relax.call_tir(kernel, [quantized, *self.stored(weight)], out_ty=out)

    def expert_linear(
        self, x: relax.Expr, weight: int, experts: relax.Expr, out: relax.TensorType
    ) -> relax.Expr:
        x, experts = self.visit_expr(x), self.visit_expr(experts)
        (rows, k), storage = self.plan.shape(weight), self.plan.storage(weight)
        top_k, n = int(out.shape[1]), int(out.shape[2])
        shared = len(x.ty.shape) == 2
        name = f"expert_linear_{storage}_{rows // n}x{n}x{k}_{top_k}" + ("_shared" if shared else "")
        kernel = self.kernel(
            name, lambda: self.backend.expert_linear(n, k, rows // n, top_k, shared, storage)
        )
        return relax.call_tir(kernel, [x, *self.stored(weight), experts], out_ty=out)

    def embedding(self, ids: relax.Expr, weight: int, out: relax.TensorType) -> relax.Expr:
        (n, k), storage = self.plan.shape(weight), self.plan.storage(weight)
        name = f"embedding_{storage}_{n}x{k}"
        kernel = self.kernel(name, lambda: self.backend.embedding(n, k, storage))
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
    """

    def __init__(self, plan: WeightPlan, exact: bool) -> None:
        self.plan, self.exact = plan, exact

    def transform_module(self, mod: IRModule, _context: tvm.transform.PassContext) -> IRModule:
        """Rewrite ``mod``."""
        return _Rewriter(mod, self.plan, self.exact).transform()
