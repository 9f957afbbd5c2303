"""LowerPagedKVCache: from the opaque cache object to explicit tensors and reduced-precision kernels.

A module written for TVM's ``PagedKVCache`` creates its cache with ``mlc.create_paged_kv_cache_generic`` and
calls ``vm.builtin.attention_kv_cache_attention_with_fused_qkv`` once a layer. This pass

- reads the geometry and the RoPE parameters from the creation call, and replaces the creation function
  by one that allocates the three tensors of the cache;
- replaces every parameter that is the opaque cache by the tensors of :data:`CACHE_PARAMETERS`;
- replaces every attention call by ``kv_append``, ``kv_seal``, ``paged_attention`` and ``kv_carry``, in place.
  The tensors are threaded through all of them and returned, so no pass may move a read or write across;
- answers ``get_query_positions`` with the positions of the step.

The layer is an argument of the kernels, so layers of the same kind (window, RoPE) share them.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import GlobalVar, IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from kvq.config import RopeKind
from kvq.errors import CompileError
from kvq.layout import KVLayout
from kvq.model.kv_cache import ATTENTION
from kvq.quantization.scheme import KVQuantization
from kvq.schedules.backend import Kernels

from .cache_geometry import CacheGeometry, callee_of, calls_of, find_creation

POSITIONS = "vm.builtin.attention_kv_cache_get_query_positions"

#: What stands in place of the opaque cache, in this order.
CACHE_PARAMETERS = (
    "kv_pool",
    "kv_open",
    "kv_workspace",
    "attention_scratch",
    "kv_faults",
    "positions",
    "append_slots",
    "page_table",
    "plan_counts",
    "seal_tasks",
    "carry_tasks",
    "attention_tasks",
    "merge_tasks",
)
#: int32 of an attention task, unless a kernel of its own for :data:`SINGLE_ROWS` wants more.
TASK_FIELDS = 7
#: Function whose rows are one of each sequence.
SINGLE_ROWS = "decode"
#: Those of them that a step changes and returns.
CACHE_STATE = ("kv_pool", "kv_open", "kv_workspace")


def kv_layout(
    geometry: CacheGeometry, kv: KVQuantization, page_size: int, row_dtype: str, order: str
) -> KVLayout:
    """The layout of a cache of this geometry."""
    return KVLayout(
        geometry.num_layers,
        geometry.num_kv_heads,
        geometry.head_dim,
        kv.k_bits,
        kv.v_bits,
        page_size,
        row_dtype,
        order,
    )


@mutator
class _Rewriter(PyExprMutator):
    def __init__(
        self,
        mod: IRModule,
        creation: GlobalVar,
        geometry: CacheGeometry,
        layout: KVLayout,
        kernels: Kernels,
    ) -> None:
        super().__init__(mod)
        self.mod, self.creation = mod, creation
        self.geometry, self.layout, self.backend = geometry, layout, kernels
        self.shape = kernels.attention_shape(layout, geometry.num_heads)
        self.single_rows = False
        self.kernels: dict[str, GlobalVar] = {}
        self.cache: relax.Var | None = None
        self.state: dict[str, relax.Var] = {}
        #: the tables of the function being rewritten, by kind
        self.ropes: dict[RopeKind, relax.Var] = {}

    def transform(self) -> IRModule:
        for gv, func in self.mod.functions_items():
            if not isinstance(func, relax.Function):
                continue
            if gv.same_as(self.creation):
                self.builder_.update_func(gv, self.creation_function())
            else:
                self.builder_.update_func(gv, self.rewrite(gv.name_hint, func))
        return self.builder_.get()

    def kernel(self, name: str, build: Any) -> GlobalVar:
        if name not in self.kernels:
            self.kernels[name] = self.builder_.add_func(build(), name)
        return self.kernels[name]

    def creation_function(self) -> relax.Function:
        """``create_paged_kv_cache(shape[num_pages, num_open, num_workspace])``: the zeroed tensors."""
        sizes = [tirx.Var(name, "int64") for name in ("num_pages", "num_open", "num_workspace")]
        shape = relax.Var("shape", relax.ShapeType(sizes))
        bb, layout = relax.BlockBuilder(), self.layout
        with bb.function("create_paged_kv_cache", [shape]):
            tensors = [
                bb.emit(relax.op.zeros(layout.pool_shape(sizes[0]), "uint32")),
                bb.emit(relax.op.zeros(layout.open_shape(sizes[1]), layout.row_dtype)),
                bb.emit(relax.op.zeros(layout.workspace_shape(sizes[2]), layout.row_dtype)),
            ]
            bb.emit_func_output(relax.Tuple(tensors))
        return bb.get()["create_paged_kv_cache"]

    def cache_parameters(self, rows: tirx.PrimExpr, task_fields: int) -> dict[str, relax.Var]:
        layout, geometry = self.layout, self.geometry

        def size(name: str) -> tirx.Var:
            return tirx.Var(name, "int64")

        scratch = (size("num_slots"), geometry.num_heads, geometry.head_dim + self.shape.scratch_extra)
        types = {
            "kv_pool": (layout.pool_shape(size("num_pages")), "uint32"),
            "kv_open": (layout.open_shape(size("num_open")), layout.row_dtype),
            "kv_workspace": (layout.workspace_shape(size("num_workspace")), layout.row_dtype),
            "attention_scratch": (scratch, "float32"),
            "kv_faults": ((size("fault_rows"), 2), "int32"),
            "positions": ((rows,), "int32"),
            "append_slots": ((rows,), "int32"),
            "page_table": ((size("table_size"),), "int32"),
            "plan_counts": ((4,), "int32"),
            "seal_tasks": ((size("max_seals"), 3), "int32"),
            "carry_tasks": ((size("max_carries"), 2), "int32"),
            "attention_tasks": ((size("max_tasks"), task_fields), "int32"),
            "merge_tasks": ((size("max_merges"), 3), "int32"),
        }
        return {name: relax.Var(name, relax.TensorType(*types[name])) for name in CACHE_PARAMETERS}

    def rewrite(self, name: str, func: relax.Function) -> relax.Function:
        caches = [p for p in func.params if isinstance(p.ty, relax.AnyType)]
        if not caches:
            return func
        attention = calls_of(func, ATTENTION)
        if len(caches) > 1 or not attention:
            raise CompileError(f"function {name!r} must take one KV cache and attend to it")
        self.cache, self.ropes = caches[0], {}
        rows = attention[0].args[1].fields[3].ty.shape[0]
        self.single_rows = name == SINGLE_ROWS and self.shape.decode is not None
        fields = self.shape.decode.task_fields if self.single_rows and self.shape.decode else TASK_FIELDS
        self.state = self.cache_parameters(rows, fields)
        params: list[relax.Var] = []
        for p in func.params:
            params += list(self.state.values()) if p.same_as(self.cache) else [p]
        body = self.visit_expr(func.body)
        new = relax.Function(params, body, None, is_pure=func.is_pure)
        for key, value in (func.attrs or {}).items():
            if key == "num_input":
                value = int(value) + len(CACHE_PARAMETERS) - 1
            new = new.with_attr(key, value)
        return new

    def visit_var_(self, var: relax.Var) -> relax.Expr:
        if self.cache is not None and var.same_as(self.cache):
            return relax.Tuple([self.state[name] for name in CACHE_STATE])
        return super().visit_var_(var)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        callee = callee_of(call)
        if callee == ATTENTION:
            _, layer, sm_scale, qkv, *sinks = call.args[1].fields
            inputs = [self.visit_expr(x) for x in (qkv, *sinks)]
            return self.attention(layer, float(sm_scale.value), inputs[0], inputs[1:], call.ty)
        if callee == POSITIONS:
            return self.state["positions"]
        if callee is not None and callee.startswith("vm.builtin.attention_kv_cache"):
            raise CompileError(f"{callee} cannot be compiled: only fused qkv attention is supported")
        return super().visit_call_(call)

    def update(self, kernel: GlobalVar, args: list[Any], names: list[str], out: Any = None) -> Any:
        """Call ``kernel`` in place on the last ``len(names)`` arguments; returns the fresh output, if any."""
        bb, first = self.builder_, len(args)
        args = args + [self.state[name] for name in names]
        indices = list(range(first, first + len(names)))
        types = [self.state[name].ty for name in names]
        if out is not None:
            indices, types = [*indices, -1], [*types, out]
        result = bb.emit(
            relax.op.call_tir_inplace(kernel, args, indices, types if len(types) > 1 else types[0])
        )
        if len(types) == 1:
            self.state[names[0]] = result
            return None
        for i, name in enumerate(names):
            self.state[name] = bb.emit(relax.TupleGetItem(result, i))
        return bb.emit(relax.TupleGetItem(result, len(names))) if out is not None else None

    def rope(self, kind: RopeKind) -> relax.Var:
        """The table of a RoPE for the step's positions, computed once a function."""
        if kind not in self.ropes:
            rotary_dim, frequency, factor = self.geometry.rope(kind)
            width = rotary_dim or 2
            name = "rope_table" if kind == "global" else f"rope_table_{kind}"
            table = self.kernel(name, lambda: self.backend.rope_table(width // 2, factor))
            positions = self.state["positions"]
            out = relax.TensorType((positions.ty.shape[0], width), "float32")
            call = relax.call_tir(table, [positions, relax.const(frequency)], out_ty=out)
            self.ropes[kind] = self.builder_.emit(call)
        return self.ropes[kind]

    def attention(
        self,
        layer: tirx.PrimExpr,
        sm_scale: float,
        qkv: relax.Expr,
        sinks: list[relax.Expr],
        out: relax.TensorType,
    ) -> relax.Expr:
        geometry, layout, backend, s = self.geometry, self.layout, self.backend, self.state
        heads, dtype, rows = geometry.num_heads, str(out.dtype), out.shape[0]
        kind = geometry.layers[int(layer)].rope
        rotary_dim = geometry.rotary_dim if kind != "none" else 0
        name = f"kv_append_{sm_scale:g}".replace(".", "_").replace("-", "m")
        append = self.kernel(
            name if kind != "none" else f"{name}_without_rope",
            lambda: backend.kv_append(layout, heads, rotary_dim, sm_scale, dtype),
        )
        q_type = relax.TensorType((rows, heads, geometry.head_dim), "float32")
        q = self.update(
            append,
            [qkv, self.rope(kind), s["append_slots"], layer],
            ["kv_open", "kv_workspace", "kv_faults"],
            q_type,
        )
        seal = self.kernel("kv_seal", lambda: backend.kv_seal(layout, heads))
        self.update(
            seal,
            [q, s["kv_open"], s["kv_workspace"], s["plan_counts"], s["seal_tasks"], layer],
            ["kv_pool"],
        )
        variant = geometry.variant(int(layer), bool(sinks))
        name, build = "paged_attention", backend.paged_attention
        if self.single_rows:
            name, build = "paged_attention_decode", backend.paged_attention_decode
        attend = self.kernel(f"{name}{variant.suffix}", lambda: build(layout, heads, dtype, variant))
        # kv_open is only read here: it passes through so that the carry below cannot come earlier
        result = self.update(
            attend,
            [
                q,
                s["kv_pool"],
                s["kv_workspace"],
                s["positions"],
                s["page_table"],
                s["plan_counts"],
                s["attention_tasks"],
                s["merge_tasks"],
                *sinks,
                layer,
            ],
            ["kv_open", "attention_scratch"],
            out,
        )
        if self.single_rows:
            return result  # the row stands in its open page: nothing is in the workspace
        carry = self.kernel("kv_carry", lambda: backend.kv_carry(layout))
        self.update(carry, [s["kv_workspace"], s["plan_counts"], s["carry_tasks"], layer], ["kv_open"])
        return result


@tvm.transform.module_pass(opt_level=0, name="LowerPagedKVCache")
class LowerPagedKVCache:
    """The pass. A module without a cache is returned as it is.

    Parameters
    ----------
    kv : KVQuantization
        How sealed pages are stored; ``none`` gives the unquantized baseline through the same path.
    page_size : int
        Tokens a page.
    row_dtype : str
        Dtype of rows that are not sealed.
    kernels : Kernels
        The backend.
    """

    def __init__(self, kv: KVQuantization, page_size: int, row_dtype: str, kernels: Kernels) -> None:
        self.kv, self.page_size, self.row_dtype, self.kernels = kv, page_size, row_dtype, kernels

    def transform_module(self, mod: IRModule, _context: tvm.transform.PassContext) -> IRModule:
        """Rewrite ``mod``."""
        found = find_creation(mod)
        if found is None:
            return mod
        creation, geometry = found
        layout = kv_layout(geometry, self.kv, self.page_size, self.row_dtype, self.kernels.layout_order)
        return _Rewriter(mod, creation, geometry, layout, self.kernels).transform()
