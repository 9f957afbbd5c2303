"""BoundGrids: kernels that TVM schedules get no more workgroups along a dimension than every GPU starts.

They have one workgroup for a piece of their result, along x. Vulkan and WebGPU promise 65,535 of a dimension,
which is 64 MiB of float32: less than a cache. What is more goes along y.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import IRModule

from kvq.schedules.gpu.block import MOST_GROUPS


@tvm.transform.module_pass(opt_level=0, name="BoundGrids")
class BoundGrids:
    """The pass; ``most`` is the limit of a dimension."""

    def __init__(self, most: int = MOST_GROUPS) -> None:
        self.most = most

    def transform_module(self, mod: IRModule, _context: tvm.transform.PassContext) -> IRModule:
        """Rewrite the loops that are bound to ``blockIdx.x`` in scheduled kernels."""
        mod = mod.clone()
        for gv, func in mod.functions_items():
            if isinstance(func, tirx.PrimFunc) and func.attrs and func.attrs.get("s_tir", False):
                mod[gv] = func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, self._bound)))
        return mod

    def _bound(self, loop: tirx.For) -> tirx.For:
        binding, extent, dtype = loop.thread_binding, loop.extent, loop.loop_var.ty.dtype
        if binding is None or binding.thread_tag != "blockIdx.x":
            return loop
        if isinstance(extent, tirx.IntImm) and extent.value <= self.most:
            return loop
        most = tirx.const(self.most, dtype)
        x, y = (tirx.Var(f"group_{axis}", dtype) for axis in "xy")
        group = y * most + x
        body = tvm_ffi.structural_map(
            loop.body, (tirx.Var, lambda var: group if var.same_as(loop.loop_var) else var)
        )
        inner = _bind(x, tirx.min(extent, most), tirx.IfThenElse(group < extent, body, None), "blockIdx.x")
        return _bind(y, tirx.ceildiv(extent, most), inner, "blockIdx.y")


def _bind(variable: tirx.Var, extent: tirx.PrimExpr, body: tirx.Stmt, tag: str) -> tirx.For:
    """A loop that is a dimension of the grid."""
    axis = tirx.IterVar(None, tirx.Var(tag, variable.ty), tirx.IterVar.ThreadIndex, tag)
    zero = tirx.const(0, variable.ty.dtype)
    return tirx.For(variable, zero, extent, tirx.ForKind.THREAD_BINDING, body, axis)
