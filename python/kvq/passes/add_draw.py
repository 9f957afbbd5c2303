"""AddDraw: a function that finds tokens of logits, where a backend has a kernel that does it on the device.

``draw(logits, draws)`` draws as :mod:`kvq.runtime.sampler` does, ``likeliest(logits)`` finds the likeliest.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.ir import IRModule

from kvq.runtime.metadata import DRAW, LIKELIEST
from kvq.runtime.sampler import DRAW_FIELDS
from kvq.schedules.backend import Kernels


@tvm.transform.module_pass(opt_level=0, name="AddDraw")
class AddDraw:
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
        """Add the function to ``mod``: logits are ``float32[n, 1, V]``, draws ``int32[n, DRAW_FIELDS]``."""
        name = self.kernels.token_function
        if name is None:
            return mod
        n = tirx.Var("n", "int64")
        logits = relax.Var("logits", relax.TensorType((n, 1, self.vocab), "float32"))
        draws = relax.Var("draws", relax.TensorType((n, DRAW_FIELDS), "int32"))
        others = [draws] if name == DRAW else []
        bb = relax.BlockBuilder(mod)
        with bb.function(name, [logits, *others]):
            gv = bb.add_func(self.kernels.find_tokens(self.vocab, self.drawable), f"{name}_kernel")
            rows = bb.emit(relax.op.reshape(logits, (n, self.vocab)))
            tokens = relax.call_tir(gv, [rows, *others], out_ty=relax.TensorType((n,), "int32"))
            bb.emit_func_output(bb.emit(tokens))
        return bb.get()


def token_function(mod: IRModule) -> str | None:
    """Name of the function in ``mod``, if there is one."""
    names = {gv.name_hint for gv in mod.get_global_vars()}
    return next((name for name in (DRAW, LIKELIEST) if name in names), None)
