"""Lowering of kernels: those written in TIRx and those scheduled by TVM go through a pipeline each.

TVM applies one pipeline to a module. A model's library has both: our kernels are TIRx, and what Relax
legalizes (a residual, a gather of rows) is schedulable TIR.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.tirx import compilation_pipeline

#: Name of the pipeline, for ``tvm.compile(..., tir_pipeline=...)``.
MIXED = "kvq_mixed"


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
