"""Attention kernels by themselves, compiled into a directory: a machine with a GPU may have no compiler."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tvm

from kvq.layout import KVLayout

#: Name of the function in a kernel's library.
ENTRY = "attention"


def kernel_path(directory: Path, kind: str, layout: KVLayout, num_heads: int) -> Path:
    """Where a kernel of a layout lies among others, without a suffix."""
    bits = f"k{layout.k_bits or 16}v{layout.v_bits or 16}"
    return (
        directory / f"{kind}_{bits}_h{num_heads}_{layout.num_kv_heads}_{layout.head_dim}_p{layout.page_size}"
    )


def write_kernel(path: Path, func: Any, target: Any, about: dict[str, int]) -> None:
    """Compile ``func`` for a CUDA ``target`` into ``path.so``, with ``about`` beside it."""
    module = tvm.IRModule({ENTRY: func.with_attr("global_symbol", ENTRY)})
    built = tvm.compile(module, target=target.target, tir_pipeline=target.tir_pipeline)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new.so")
    built.export_library(str(temporary), fpack_imports=target.pack_imports)
    path.with_suffix(".json").write_text(json.dumps(about))
    temporary.replace(path.with_suffix(".so"))


def read_kernel(path: Path, compile_now: Callable[[], None]) -> tuple[Callable[..., None], dict[str, int]]:
    """The function in ``path.so`` and what is known about it; ``compile_now`` makes it if it is not there."""
    if not path.with_suffix(".so").exists():
        compile_now()
    function = tvm.runtime.load_module(str(path.with_suffix(".so")))[ENTRY]
    return function, json.loads(path.with_suffix(".json").read_text())
