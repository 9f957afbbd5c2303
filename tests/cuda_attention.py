"""Geometries of the decode kernels' tests, and a directory of their compiled kernels.

``python tests/cuda_attention.py compile DIRECTORY [ARCHS]`` compiles them all, without a GPU too;
``$KVQ_KERNELS`` names the directory for the tests. ``run DIRECTORY`` launches a few on small shapes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvq.layout import KVLayout


def layout(k_bits, v_bits, dim=128, page=64, kv_heads=2) -> KVLayout:
    return KVLayout(1, kv_heads, dim, k_bits, v_bits, page, order="fragments")


#: Name -> layout and query heads of each KV head.
GEOMETRIES = {
    "int4": (layout(4, 4), 4),
    "int3": (layout(3, 3), 4),
    "fp16": (layout(None, None), 4),
    "int8": (layout(8, 8), 4),
    "int4 head_dim 64, group of 3": (layout(4, 4, 64, kv_heads=3), 3),
    "int3 head_dim 64": (layout(3, 3, 64), 4),
    "int4 group of 1": (layout(4, 4), 1),
    "int4 group of 8": (layout(4, 4), 8),
    "int4 group of 12, head_dim 96": (layout(4, 4, 96), 12),
    "int4 group of 16": (layout(4, 4), 16),
    "int3 head_dim 80": (layout(3, 3, 80), 4),
    "int4 head_dim 112, page 128": (layout(4, 4, 112, 128), 5),
    "int4 head_dim 256": (layout(4, 4, 256), 4),
    "fp16 head_dim 256": (layout(None, None, 256), 4),
    "int2 head_dim 192": (layout(2, 2, 192), 4),
    "int4 page 32": (layout(4, 4, page=32), 4),
    "int3 page 128": (layout(3, 3, page=128), 4),
    "k=int4:v=int2": (layout(4, 2), 4),
    "k=int4:v=none": (layout(4, None), 4),
    "k=none:v=int3": (layout(None, 3), 4),
}


def compile_all(directory: Path, archs: str | None) -> None:
    from kvq.bench.attention import compile_kernel

    for name, (shape, group) in GEOMETRIES.items():
        compile_kernel(directory, shape, group * shape.num_kv_heads, archs)
        print(name, flush=True)


def run_small(directory: Path) -> None:
    """A few launches of a few kernels, for compute-sanitizer."""
    from kvq.bench.attention import AttentionRun, load_kernel
    from kvq.bench.attention_case import AttentionCase
    from kvq.runtime.device import Device

    device = Device.open("cuda")
    for name in ("int4", "int3", "fp16", "int4 group of 16"):
        shape, group = GEOMETRIES[name]
        kernel = load_kernel(directory, shape, group * shape.num_kv_heads)
        case = AttentionCase(shape, kernel.num_heads, [1, 70, 200, 3000, 64], kernel.device(10))
        run = AttentionRun(kernel, case, device)
        for _ in range(3):
            error = case.error(run.output(), samples=6)
            assert error <= 5e-3, f"{name}: {error}"
        print(f"{name}: {len(case.tasks)} tasks, error {error:.1e}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run_small(Path(sys.argv[2]))
    else:
        compile_all(Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
