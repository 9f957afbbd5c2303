"""AttachMetadata: the library describes itself through a function ``_metadata() -> JSON text``."""

from __future__ import annotations

import json
from typing import Any

import tvm
from tvm import relax
from tvm.ir import IRModule, StringImm


@tvm.transform.module_pass(opt_level=0, name="AttachMetadata")
class AttachMetadata:
    """The pass.

    Parameters
    ----------
    metadata : dict
        JSON-ready; its fields are in ``docs/design.md``.
    """

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.metadata = metadata

    def transform_module(self, mod: IRModule, _context: tvm.transform.PassContext) -> IRModule:
        """Add the function to ``mod``."""
        bb = relax.BlockBuilder(mod)
        with bb.function("_metadata", []):
            bb.emit_func_output(StringImm(json.dumps(self.metadata)))
        return bb.get()
