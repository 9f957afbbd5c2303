"""AttachMetadata: the library describes itself through a function ``_metadata() -> JSON text``."""

from __future__ import annotations

import json
from typing import Any

import tvm
from tvm import relax
from tvm.ir import IRModule, StringImm

from .add_draw import token_function
from .bound_rows import step_storage_bytes


@tvm.transform.module_pass(opt_level=0, name="AttachMetadata")
class AttachMetadata:
    """The pass.

    Parameters
    ----------
    metadata : dict
        JSON-ready; its fields are in ``docs/design.md``. The pass adds
        ``step_bytes`` and ``token_function``.
    """

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.metadata = metadata

    def transform_module(self, mod: IRModule, _context: tvm.transform.PassContext) -> IRModule:
        """Add the function to ``mod``, whose memory is planned."""
        fields = {
            **self.metadata,
            "step_bytes": step_storage_bytes(mod),
            "token_function": token_function(mod),
        }
        bb = relax.BlockBuilder(mod)
        with bb.function("_metadata", [], attrs={"global_symbol": "_metadata"}):
            bb.emit_func_output(StringImm(json.dumps(fields)))
        return bb.get()
