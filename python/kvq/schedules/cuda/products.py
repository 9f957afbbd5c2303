"""What the kernels of matrix products have in common: their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir

from kvq.schedules.backend import ROUNDED, RowSource

from .weight_fragments import stored_tensors

#: ``body(weight, x, gain, residual, out, n)`` emits the device code; gain and residual may be None.
Body = Callable[[Sequence[Any], Any, Any, Any, Any, Any], None]


def product_func(
    n_out: int,
    k: int,
    storage: str,
    residual: bool,
    attributes: dict[str, Any],
    body: Body,
    gated: bool = False,
    dtype: str = "float16",
    rows: RowSource = ROUNDED,
) -> tirx.PrimFunc:
    """Build the kernel ``out = x @ w.T``, or ``residual + x @ w.T``.

    Arguments of the kernel: x ``dtype[n, K]``, or ``float32[n, K]`` where the product rounds it, the gain
    ``float32[K]`` where it normalizes, the tensors of the weight in the order of ``weight_fragments.py``, the
    residual ``float32[n, N]`` if there is one, and out ``float32[n, N]``, of a gated product
    ``dtype[n, N / 2]``. ``dtype`` is that of the operands, ``float16`` or ``bfloat16``.
    """
    stored = stored_tensors(storage, n_out, k, dtype)
    with IRBuilder() as builder, ir.prim_func(is_private=True):
        ir.func_name("product")
        norm = ["gain"] if rows.eps is not None else []
        names = ["x", *norm, *stored, *(["residual"] if residual else []), "out"]
        handles = {name: ir.arg(f"{name}_h", ir.handle()) for name in names}
        ir.func_attr(attributes)
        n = ir.int64()
        IRBuilder.name("n", n)

        def match(name: str, shape: tuple[Any, ...], dtype: str) -> Any:
            buffer = ir.match_buffer(handles[name], shape, dtype)
            IRBuilder.name(name, buffer)
            return buffer

        x = match("x", (n, k), dtype if rows.rounded else "float32")
        gain = match("gain", (k,), "float32") if norm else None
        weight = [match(name, *what) for name, what in stored.items()]
        added = match("residual", (n, n_out), "float32") if residual else None
        out = match("out", (n, n_out // 2), dtype) if gated else match("out", (n, n_out), "float32")
        ir.device_entry()
        body(weight, x, gain, added, out, n)
    return builder.get()
