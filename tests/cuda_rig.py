"""Kernels on a GPU, for tests: compiled where TVM has its compiler, else read from ``$KVQ_KERNELS``.

``python tests/cuda_rig.py DIRECTORY [sm_90,...]`` writes the libraries that the tests need to a directory: a
machine with a GPU then needs neither compiler nor nvcc, only the runtime.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from kernel_rig import CacheKernels, CacheRig, on_tensors, random_rows
from kvq.errors import LibraryError
from kvq.layout import KVLayout
from kvq.quantization.storage import STORAGES, pack_codes
from kvq.runtime.device import Device
from kvq.schedules.attention_variant import AttentionVariant


@cache
def gpu() -> Any:
    """The GPU's handle, or None where there is none."""
    try:
        return Device.open("cuda").handle
    except LibraryError:
        return None


def tensor(array: np.ndarray) -> tvm.runtime.Tensor:
    return tvm.runtime.tensor(np.ascontiguousarray(array), gpu())


def stored_weight(
    n_out: int, k: int, kind: str, rng: np.random.Generator
) -> tuple[list[tvm.runtime.Tensor], np.ndarray]:
    """A weight's tensors as stored, and what they stand for: ``float32[n_out, k]``."""
    if STORAGES[kind].bits is not None:
        rows = random_rows(n_out, k, kind)
        parts = [pack_codes(rows.codes, STORAGES[kind].bits), rows.scale, rows.offset]
        return [tensor(x) for x in parts if x is not None], rows.dequantized()
    weight = (rng.standard_normal((n_out, k)) / k**0.5).astype(np.float32)
    return [tensor(weight.astype(kind))], weight.astype(kind).astype(np.float32)


@cache
def directory() -> Path:
    return Path(os.environ.get("KVQ_KERNELS") or tempfile.mkdtemp(prefix="kvq-cuda-"))


def _path(name: str, arguments: tuple[Any, ...], suffix: str) -> Path:
    key = hashlib.sha256(repr((name, arguments)).encode()).hexdigest()[:12]
    return directory() / f"{name}-{key}.{suffix}"


@cache
def kernel(name: str, *arguments: Any) -> Any:
    """The kernel that the backend's method ``name`` makes of the arguments.

    The backend has products of float32 rows; ``float16.rounded.linear`` is a method of one that rounds them.
    """
    path = _path(name, arguments, "so")
    if not path.exists():
        build(path, name, arguments)
    return tvm.runtime.load_module(str(path))["main"]


def prepared(name: str, raw: np.ndarray, *arguments: Any) -> tvm.runtime.Tensor:
    """A stored tensor as the backend's method ``name`` says that kernels want it."""
    made = kernel(name, *arguments)
    shape, dtype = json.loads(_path(name, arguments, "json").read_text())
    out = tvm.runtime.empty(tuple(shape), dtype, gpu())
    made(tensor(raw), out)
    return out


def build(path: Path, name: str, arguments: tuple[Any, ...], archs: str | None = None) -> None:
    """Compile the kernel to a library; what a preparation makes is said beside it."""
    from kvq.compiler.hosts import this_host
    from kvq.compiler.link import linker_for
    from kvq.compiler.target import cuda_target
    from kvq.schedules.backend import Preparation

    activations, found, method = name.partition(".")
    target = cuda_target(archs, activations) if found else cuda_target(archs)
    func = attrgetter(method or name)(target.kernels)(*arguments)
    if isinstance(func, Preparation):
        path.with_suffix(".json").write_text(json.dumps([func.shape, func.dtype]))
        func = func.build()
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    built = tvm.compile(module, target=target.target, tir_pipeline=target.tir_pipeline)
    built.mod.export_library(str(path), fcompile=linker_for(this_host()), fpack_imports=target.pack_imports)


@cache
def attention_shape(layout: KVLayout, num_heads: int) -> tuple[int, int, int]:
    """Pages of a split, rows of a tile and extra floats of a scratch slot."""
    path = _path("attention_shape", (layout, num_heads), "json")
    if not path.exists():
        from kvq.schedules.cuda.backend import CudaKernels

        shape = CudaKernels(("sm_80",)).attention_shape(layout, num_heads)
        path.write_text(json.dumps([shape.split_pages, shape.tile_rows, shape.scratch_extra]))
    split_pages, tile_rows, extra = json.loads(path.read_text())
    return split_pages, tile_rows, extra


class CudaCacheRig(CacheRig):
    """The rig's steps on the GPU."""

    def __init__(self, layout: KVLayout, group: int, **options: Any) -> None:
        super().__init__(layout, group, **{"threads": 132, "slots": 0, **options})

    def build_kernels(self, backend: None) -> CacheKernels:
        kernels = cache_kernels(self.layout, self.num_heads, self.variant)
        return CacheKernels(*kernels, *attention_shape(self.layout, self.num_heads))


def cache_kernels(layout: KVLayout, heads: int, variant: AttentionVariant) -> list[Any]:
    """The kernels of a cache on numpy arrays, in the order in which a step calls them."""
    kernels = (
        kernel("kv_append", layout, heads, layout.head_dim, layout.head_dim**-0.5, "float32"),
        kernel("kv_seal", layout, heads),
        kernel("paged_attention", layout, heads, "float32", variant),
        kernel("kv_carry", layout),
    )
    return [partial(_on_gpu, func) for func in kernels]


def _on_gpu(func: Any, *arguments: Any) -> None:
    on_tensors(func, arguments, gpu())


if __name__ == "__main__":
    os.environ["KVQ_KERNELS"] = sys.argv[1]
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    import test_cuda_experts
    import test_cuda_products
    from test_cuda_kernels import NEEDED, RIGS

    for name, *arguments in (*NEEDED, *test_cuda_experts.NEEDED, *test_cuda_products.NEEDED):
        path = _path(name, tuple(arguments), "so")
        if not path.exists():
            build(path, name, tuple(arguments), *sys.argv[2:])
    for layout, heads, _ in RIGS:
        attention_shape(layout, heads)
