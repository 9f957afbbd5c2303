"""AddLikeliest: the function ``likeliest(logits)``, where a backend finds these tokens on the device."""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.ir import IRModule

from kvq.schedules.backend import Kernels

#: The function: of logits ``float32[n, 1, V]`` the ids ``int32[n]``.
LIKELIEST = "likeliest"


@tvm.transform.module_pass(opt_level=0, name="AddLikeliest")
class AddLikeliest:
    """The pass.

    Parameters
    ----------
    vocab, drawable : int
        Width of the logits, and how many ids may be drawn.
    kernels : Kernels
        The backend.
    """

    def __init__(self, vocab: int, drawable: int, kernels: Kernels) -> None:
        self.vocab, self.drawable, self.kernels = vocab, drawable, kernels

    def transform_module(self, mod: IRModule, _context: tvm.transform.PassContext) -> IRModule:
        """Add the function to ``mod``, if the backend has the kernel."""
        kernel = self.kernels.likeliest(self.vocab, self.drawable)
        if kernel is None:
            return mod
        bb, n = relax.BlockBuilder(mod), tirx.Var("n", "int64")
        logits = relax.Var("logits", relax.TensorType((n, 1, self.vocab), "float32"))
        with bb.function(LIKELIEST, [logits]):
            gv = bb.add_func(kernel, "likeliest_kernel")
            rows = bb.emit(relax.op.reshape(logits, (n, self.vocab)))
            bb.emit_func_output(bb.emit(relax.call_tir(gv, [rows], out_ty=relax.TensorType((n,), "int32"))))
        return bb.get()
