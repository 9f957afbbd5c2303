"""Products of the portable kernels on a GPU: time, and the part of copy bandwidth at which weights are read.

    python scripts/bench_portable_products.py compile DIRECTORY [--device vulkan]
    python scripts/bench_portable_products.py run DIRECTORY [--device vulkan] [--rows 1,4,16,64,512]

The matrices are those of Llama-3-8B, in int4. Compiling needs no GPU, running no compiler. Prints a line of
JSON for each matrix and number of rows; what a kernel computes is compared with numpy first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from kvq.quantization.storage import PackedRows, pack_codes
from kvq.runtime.device import Device
from portable_bench import ROTATION_BYTES, entry_of, main, seconds_each

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
STORAGE = "int4"


def name_of(n: int, k: int) -> str:
    """What a product's library is called."""
    return f"{STORAGE}_{n}x{k}"


def kernels(backend: Any) -> Iterator[tuple[str, tirx.PrimFunc]]:
    """The product with each matrix."""
    for n, k in SHAPES:
        yield name_of(n, k), backend.linear(n, k, STORAGE)


def measured(directory: Path, n: int, k: int, rows: list[int], device: Device) -> Iterator[dict[str, Any]]:
    """Times and errors of a matrix's product with each number of rows."""
    function = entry_of(directory / f"{name_of(n, k)}.so")
    rng = np.random.default_rng(0)
    scale = rng.uniform(0.5, 1.5, (n, k // 32)).astype(np.float16)
    stored = PackedRows(STORAGE, rng.integers(0, 16, (n, k), dtype=np.uint8), scale)
    weight_bytes = n * k // 2 + scale.nbytes

    def tensor(array: np.ndarray) -> Any:
        return tvm.runtime.tensor(array, device.handle)

    copies = max(1, -(-ROTATION_BYTES // weight_bytes))
    weights = [(tensor(pack_codes(stored.codes, 4)), tensor(scale)) for _ in range(copies)]
    for count in rows:
        inputs = rng.standard_normal((count, k)).astype(np.float32)
        x, out = tensor(inputs), tensor(np.full((count, n), np.nan, np.float32))
        function(x, *weights[0], out)
        sample = slice(0, n, max(1, n // 64))
        part = PackedRows(STORAGE, stored.codes[sample], scale[sample]).dequantized()
        expected = inputs[-1:] @ part.T
        error = np.abs(out.numpy()[-1:, sample] - expected).max() / np.abs(expected).max()

        def launch(i: int, x: Any = x, out: Any = out) -> None:
            function(x, *weights[i % copies], out)

        seconds = seconds_each(launch, device)
        rates = {"tflops": 2e-12 * count * n * k / seconds, "tb_per_s": weight_bytes / seconds / 1e12}
        yield {"n": n, "k": k, "rows": count, "us": 1e6 * seconds, "error": float(error), **rates}


def measure(args: argparse.Namespace, device: Device) -> Iterator[dict[str, Any]]:
    """All matrices and numbers of rows."""
    rows = [int(count) for count in args.rows.split(",")]
    for n, k in SHAPES:
        yield from measured(args.directory, n, k, rows, device)


if __name__ == "__main__":
    main(__doc__ or "", {"rows": "1,4,16,64,512"}, kernels, measure)
