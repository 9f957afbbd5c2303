"""Decode attention of the portable kernels on a GPU: time, and the part of copy bandwidth that it reaches.

    python scripts/bench_portable_attention.py compile DIRECTORY [--device vulkan]
    python scripts/bench_portable_attention.py run DIRECTORY [--device vulkan] [--shape 1x32768]

The shape is Llama-3-8B's (32 heads, 8 KV heads of 128). Compiling needs no GPU, running no compiler. Prints a
line of JSON for each cache; what a kernel computes is compared with float32 over the dequantized cache first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from kvq.bench.attention import Geometry, parse_shapes
from kvq.bench.attention_case import AttentionCase
from kvq.bench.attention_kernels import ENTRY
from kvq.layout import KVLayout
from kvq.quantization.scheme import KVQuantization
from kvq.runtime.decode_plan import DecodeDevice
from kvq.runtime.device import Device

SCHEMES = {name: KVQuantization.parse(name) for name in ("int4", "none")}
HEADS, HEAD_DIM = Geometry().num_heads, Geometry().head_dim
#: Key pages of a split, as the portable kernels cut rows.
SPLIT_PAGES = 4
#: Caches to rotate over: more than a GPU's L2 holds.
ROTATION_BYTES = 256 << 20
LAUNCHES, REPLAYS = 48, 7


def layout_of(scheme: KVQuantization) -> KVLayout:
    """One layer's cache in the portable kernels' order."""
    geometry = Geometry()
    return KVLayout(
        1, geometry.num_kv_heads, geometry.head_dim, scheme.k_bits, scheme.v_bits, 64, order="lanes"
    )


def compile_kernels(directory: Path, device: str) -> None:
    """Compile the kernels of all schemes."""
    from kvq.compiler.gpu_target import gpu_target

    target = gpu_target(device)
    directory.mkdir(parents=True, exist_ok=True)
    for name, scheme in SCHEMES.items():
        func = target.kernels.paged_attention_decode(layout_of(scheme), HEADS, "float32")
        module = tvm.IRModule({ENTRY: func.with_attr("global_symbol", ENTRY)})
        built = tvm.compile(module, target=target.target, tir_pipeline=target.tir_pipeline)
        built.export_library(str(directory / f"{name}.so"))


class PortableCase(AttentionCase):
    """A decode step's cache, and how the portable kernels' plan cuts it.

    Attributes
    ----------
    open
        Open pages as the kernels have them, keys by channel.
    merges
        Rows whose parts are added up.
    """

    def __init__(self, layout: KVLayout, lengths: list[int]) -> None:
        super().__init__(layout, HEADS, lengths, DecodeDevice(1, 1, 0.1, 0.1, 0.1, 1.0))
        parts = self.rows.reshape(*self.rows.shape[:4], layout.page_size, HEAD_DIM).copy()
        keys = parts[:, :, :, 0]
        keys[...] = np.moveaxis(keys.copy(), -1, -2).reshape(keys.shape)
        self.open = parts.reshape(self.rows.shape)
        tasks, merges, used = [], [], 0
        for row, position in enumerate(self.positions.tolist()):
            start, page = int(self.starts[row]), int(self._row_pages[row])
            splits = position // layout.page_size // SPLIT_PAGES + 1
            if splits == 1:
                tasks.append((row, row + 1, start, page, 0, 1, -1))
                continue
            tasks += [(row, row + 1, start, page, s, s + 1, used + s) for s in range(splits)]
            merges.append((row, used, splits))
            used += splits
        self.tasks = np.array(tasks, np.int32)
        self.merges = np.array(merges or [(0, 0, 0)], np.int32)
        self.counts = np.array([0, 0, len(tasks), len(merges)], np.int32)


def seconds_of(work: Any, device: Device) -> float:
    """Median time of a round of work, with the wait for its end."""
    work()
    device.synchronize()
    times = []
    for _ in range(REPLAYS):
        started = time.perf_counter()
        work()
        device.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def copy_rate(device: Device) -> float:
    """Bytes a second, read and written, of copies within the device's memory."""
    words = min(1 << 28, int(device.handle.total_global_memory) // 64)
    source, target = (tvm.runtime.empty((words,), "uint32", device.handle) for _ in range(2))
    rounds = 8

    def work() -> None:
        for _ in range(rounds):
            source.copyto(target)

    return rounds * 8 * words / seconds_of(work, device)


def measure(directory: Path, name: str, lengths: list[int], device: Device) -> dict[str, Any]:
    """Time and error of a kernel on sequences of these lengths."""
    function = tvm.runtime.load_module(str(directory / f"{name}.so"))[ENTRY]
    case = PortableCase(layout_of(SCHEMES[name]), lengths)

    def tensor(array: np.ndarray) -> Any:
        return tvm.runtime.tensor(array, device.handle)

    copies = max(2, -(-ROTATION_BYTES // case.cache_bytes)) if case.cache_bytes < ROTATION_BYTES else 1
    pools = [tensor(case.pool) for _ in range(copies)]
    workspace = np.zeros(case.layout.workspace_shape(1), np.float16)
    before = [
        tensor(x) for x in (workspace, case.positions, case.table, case.counts, case.tasks, case.merges)
    ]
    q, rows, scratch = tensor(case.q), tensor(case.open), tensor(case.scratch)
    out = tensor(np.full(case.q.shape, np.nan, np.float32))

    def launch(copy: int) -> None:
        function(q, pools[copy], *before, 0, rows, scratch, out)

    launch(0)
    error = case.error(out.numpy(), samples=8)
    seconds = seconds_of(lambda: [launch(n % copies) for n in range(LAUNCHES)], device) / LAUNCHES
    return {"kv": name, "us": 1e6 * seconds, "cache_bytes": case.cache_bytes, "error": error}


def main() -> None:
    """Compile, or run and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["compile", "run"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="vulkan", help="default: %(default)s")
    parser.add_argument("--shape", default="1x32768", help="as kvq bench attention takes it")
    parser.add_argument("--kv", default="int4,none", help="default: %(default)s")
    args = parser.parse_args()
    if args.what == "compile":
        compile_kernels(args.directory, args.device)
        return
    device = Device.open(args.device)
    rate = copy_rate(device)
    for shape in parse_shapes(args.shape):
        for name in args.kv.split(","):
            row = measure(args.directory, name, shape.lengths(64), device)
            row |= {"shape": str(shape), "copy_tb_per_s": rate / 1e12}
            row["of_copy"] = row["cache_bytes"] / row["us"] * 1e6 / rate
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
