"""What follows kvq's own passes on a GPU: TVM's pipelines, put together for kernels in TIRx.

A model's library has two kinds of kernels: ours are TIRx, and what Relax legalizes (a residual, a gather of
rows) is schedulable TIR. TVM's default pipelines take modules of one kind.
"""

from __future__ import annotations

import os
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir.transform import Pass
from tvm.s_tir import dlight
from tvm.tirx import compilation_pipeline

from .bound_grids import BoundGrids

# Where a CUDA runtime is loaded, TVM would call a compiler of its own, for this machine's GPU alone. So it
# keeps the source, which `fatbin.py` compiles when the library is written.
os.environ["TVM_COMPILE_FORCE_FALLBACK"] = "1"

#: Name of the pipeline for kernels, for ``tvm.compile(..., tir_pipeline=...)``.
MIXED = "kvq_mixed"


def relax_pipeline(target: tvm.target.Target) -> Pass:
    """TVM's default pipeline for a GPU, but reshapes stay what they are: views.

    The default makes kernels of them and then recognizes these by their loops, which fails on TIRx. What
    Relax legalizes is pointwise, or small: no kernel of it needs more than dlight's plainest schedule.
    """
    bound: list[Pass] = []
    if target.kind.name == "cuda":
        from tvm.relax.backend.cuda.pipeline import finalize_passes
    else:
        from tvm.relax.backend.gpu_generic.pipeline import finalize_passes

        bound = [BoundGrids()]

    @tvm.transform.module_pass(opt_level=0, name="RelaxPipeline")
    def run(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        with target:
            passes = [
                relax.transform.LegalizeOps(skip_ops=["relax.reshape"]),
                relax.transform.AnnotateTIROpPattern(),
                relax.transform.FoldConstant(),
                relax.transform.FuseOps(),
                relax.transform.FuseTIR(),
                dlight.ApplyDefaultSchedule(dlight.gpu.Fallback()),
                *bound,
                relax.transform.ToNonDataflow(),
                relax.transform.RemovePurityChecking(),
                relax.transform.CallTIRRewrite(),
                *finalize_passes(target),
            ]
            return tvm.transform.Sequential(passes)(mod)

    return run


def _mixed_pipeline() -> tuple[Any, Any, Any]:
    scheduled, _, _ = compilation_pipeline.get_tir_pipeline("s_tir")
    written, finalize_host, finalize_device = compilation_pipeline.get_tir_pipeline("tirx")

    @tvm.transform.module_pass(opt_level=0, name="MixedPipeline")
    def run(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        def is_scheduled(func: tirx.PrimFunc) -> bool:
            return bool(func.attrs.get("s_tir", False))

        ours = tirx.transform.Filter(lambda func: not is_scheduled(func))(mod)
        theirs = tirx.transform.Filter(is_scheduled)(mod)
        out = written(ours)
        out.update(scheduled(theirs))
        return out

    return run, finalize_host, finalize_device


compilation_pipeline.register_tir_pipeline(MIXED, _mixed_pipeline)
