"""Products of the portable kernels on a GPU: time, and the part of copy bandwidth at which weights are read.

    python scripts/bench_portable_products.py compile DIRECTORY [--device vulkan]
    python scripts/bench_portable_products.py run DIRECTORY [--device vulkan] [--rows 1,4,16,64,512]

The matrices are those of Llama-3-8B, in int4. Compiling needs no GPU, running no compiler. Prints a line of
JSON for each matrix and number of rows; what a kernel computes is compared with numpy first.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from bench_portable_attention import LAUNCHES, ROTATION_BYTES, copy_rate, seconds_of
from kvq.bench.attention_kernels import ENTRY
from kvq.quantization.storage import PackedRows, pack_codes
from kvq.runtime.device import Device

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
STORAGE = "int4"


def library_of(directory: Path, n: int, k: int) -> str:
    """Path of a product's library."""
    return str(directory / f"{STORAGE}_{n}x{k}.so")


def compile_kernels(directory: Path, device: str) -> None:
    """Compile the product with each matrix."""
    from kvq.compiler.gpu_target import gpu_target

    target = gpu_target(device)
    directory.mkdir(parents=True, exist_ok=True)
    for n, k in SHAPES:
        func = target.kernels.linear(n, k, STORAGE)
        module = tvm.IRModule({ENTRY: func.with_attr("global_symbol", ENTRY)})
        built = tvm.compile(module, target=target.target, tir_pipeline=target.tir_pipeline)
        built.export_library(library_of(directory, n, k))


def measure(directory: Path, n: int, k: int, rows: list[int], device: Device) -> list[dict[str, Any]]:
    """Times and errors of a matrix's product with each number of rows."""
    function = tvm.runtime.load_module(library_of(directory, n, k))[ENTRY]
    rng = np.random.default_rng(0)
    scale = rng.uniform(0.5, 1.5, (n, k // 32)).astype(np.float16)
    stored = PackedRows(STORAGE, rng.integers(0, 16, (n, k), dtype=np.uint8), scale)
    weight_bytes = n * k // 2 + scale.nbytes

    def tensor(array: np.ndarray) -> Any:
        return tvm.runtime.tensor(array, device.handle)

    copies = max(1, -(-ROTATION_BYTES // weight_bytes))
    weights = [(tensor(pack_codes(stored.codes, 4)), tensor(scale)) for _ in range(copies)]
    found = []
    for count in rows:
        inputs = rng.standard_normal((count, k)).astype(np.float32)
        x, out = tensor(inputs), tensor(np.full((count, n), np.nan, np.float32))
        function(x, *weights[0], out)
        sample = slice(0, n, max(1, n // 64))
        part = PackedRows(STORAGE, stored.codes[sample], scale[sample]).dequantized()
        expected = inputs[-1:] @ part.T
        error = np.abs(out.numpy()[-1:, sample] - expected).max() / np.abs(expected).max()

        def work(x: Any = x, out: Any = out) -> None:
            for i in range(LAUNCHES):
                function(x, *weights[i % copies], out)

        seconds = seconds_of(work, device) / LAUNCHES
        found.append({"n": n, "k": k, "rows": count, "us": 1e6 * seconds, "error": float(error)})
        found[-1] |= {
            "tflops": 2e-12 * count * n * k / seconds,
            "weight_tb_per_s": weight_bytes / seconds / 1e12,
        }
    return found


def main() -> None:
    """Compile, or run and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["compile", "run"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="vulkan", help="default: %(default)s")
    parser.add_argument("--rows", default="1,4,16,64,512", help="default: %(default)s")
    args = parser.parse_args()
    if args.what == "compile":
        compile_kernels(args.directory, args.device)
        return
    device, rows = Device.open(args.device), [int(count) for count in args.rows.split(",")]
    rate = copy_rate(device) / 1e12
    for n, k in SHAPES:
        for row in measure(args.directory, n, k, rows, device):
            print(json.dumps({**row, "of_copy": row["weight_tb_per_s"] / rate}), flush=True)


if __name__ == "__main__":
    main()
