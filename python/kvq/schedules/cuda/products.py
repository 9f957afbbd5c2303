"""What the kernels of matrix products have in common: their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir

from .weight_fragments import stored_tensors

#: ``body(weight, x, residual, out, n)`` emits the device code; the residual is None where there is none.
Body = Callable[[Sequence[Any], Any, Any, Any, Any], None]


def product_func(
    n_out: int,
    k: int,
    storage: str,
    residual: bool,
    attributes: dict[str, Any],
    body: Body,
    gated: bool = False,
    dtype: str = "float16",
) -> tirx.PrimFunc:
    """Build the kernel ``out = x @ w.T``, or ``residual + x @ w.T``.

    Arguments of the kernel: x ``dtype[n, K]``, the tensors of the weight in the order of
    ``weight_fragments.py``, the residual ``float32[n, N]`` if there is one, and out ``float32[n, N]``, of a
    gated product ``dtype[n, N / 2]``. ``dtype`` is that of the operands, ``float16`` or ``bfloat16``.
    """
    stored = stored_tensors(storage, n_out, k, dtype)
    with IRBuilder() as builder, ir.prim_func(is_private=True):
        ir.func_name("product")
        names = ["x", *stored, *(["residual"] if residual else []), "out"]
        handles = {name: ir.arg(f"{name}_h", ir.handle()) for name in names}
        ir.func_attr(attributes)
        n = ir.int64()
        IRBuilder.name("n", n)

        def match(name: str, shape: tuple[Any, ...], dtype: str) -> Any:
            buffer = ir.match_buffer(handles[name], shape, dtype)
            IRBuilder.name(name, buffer)
            return buffer

        x = match("x", (n, k), dtype)
        weight = [match(name, *what) for name, what in stored.items()]
        added = match("residual", (n, n_out), "float32") if residual else None
        out = match("out", (n, n_out // 2), dtype) if gated else match("out", (n, n_out), "float32")
        ir.device_entry()
        body(weight, x, added, out, n)
    return builder.get()
