"""Decode attention of the portable kernels on a GPU: time, and the part of copy bandwidth that it reaches.

    python scripts/bench_portable_attention.py compile DIRECTORY [--device vulkan]
    python scripts/bench_portable_attention.py run DIRECTORY [--device vulkan] [--shape 1x32768]

The shape is Llama-3-8B's (32 heads, 8 KV heads of 128). Compiling needs no GPU, running no compiler. Prints a
line of JSON for each cache; what a kernel computes is compared with float32 over the dequantized cache first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from kvq.bench.attention import Geometry, parse_shapes
from kvq.bench.attention_case import AttentionCase
from kvq.layout import KVLayout
from kvq.quantization.scheme import KVQuantization
from kvq.runtime.decode_plan import DecodeDevice
from kvq.runtime.device import Device
from kvq.runtime.step_plan import cut_row, splits_together
from portable_bench import ROTATION_BYTES, entry_of, main, seconds_each

SCHEMES = {name: KVQuantization.parse(name) for name in ("int4", "none")}
HEADS, HEAD_DIM = Geometry().num_heads, Geometry().head_dim
#: Key pages of a split, as the portable kernels cut rows; their module needs a compiler.
SPLIT_PAGES = 4


def layout_of(scheme: KVQuantization) -> KVLayout:
    """One layer's cache in the portable kernels' order."""
    geometry = Geometry()
    return KVLayout(
        1, geometry.num_kv_heads, geometry.head_dim, scheme.k_bits, scheme.v_bits, 64, order="lanes"
    )


def kernels(backend: Any) -> Iterator[tuple[str, tirx.PrimFunc]]:
    """The kernels of all schemes."""
    for name, scheme in SCHEMES.items():
        yield name, backend.paged_attention_decode(layout_of(scheme), HEADS, "float32")


class PortableCase(AttentionCase):
    """A decode step's cache, and how the portable kernels' plan cuts it.

    Attributes
    ----------
    open
        Open pages as the kernels have them, keys by channel.
    merges
        Rows whose parts are added up.
    """

    def __init__(self, layout: KVLayout, lengths: list[int], units: int) -> None:
        super().__init__(layout, HEADS, lengths, DecodeDevice(1, 1, 0.1, 0.1, 0.1, 1.0))
        parts = self.rows.reshape(*self.rows.shape[:4], layout.page_size, HEAD_DIM).copy()
        keys = parts[:, :, :, 0]
        keys[...] = np.moveaxis(keys.copy(), -1, -2).reshape(keys.shape)
        self.open = parts.reshape(self.rows.shape)
        tasks, merges, used = [], [], 0
        splits = [position // layout.page_size // SPLIT_PAGES + 1 for position in self.positions.tolist()]
        together = splits_together(sum(splits) * layout.num_kv_heads, units)
        for row, count in enumerate(splits):
            own = row, row + 1, int(self.starts[row]), int(self._row_pages[row])
            parts = cut_row(0, count, together)[::-1]
            if len(parts) == 1:
                tasks.append((*own, 0, count, -1))
                continue
            tasks += [(*own, *part, used + i) for i, part in enumerate(parts)]
            merges.append((row, used, len(parts)))
            used += len(parts)
        self.tasks = np.array(tasks, np.int32)
        self.merges = np.array(merges or [(0, 0, 0)], np.int32)
        self.counts = np.array([0, 0, len(tasks), len(merges)], np.int32)


def measured(directory: Path, name: str, lengths: list[int], device: Device) -> dict[str, Any]:
    """Time and error of a kernel on sequences of these lengths."""
    function = entry_of(directory / f"{name}.so")
    case = PortableCase(layout_of(SCHEMES[name]), lengths, device.threads)

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

    def launch(n: int) -> None:
        function(q, pools[n % copies], *before, 0, rows, scratch, out)

    launch(0)
    error = case.error(out.numpy(), samples=8)
    seconds = seconds_each(launch, device)
    rate = case.cache_bytes / seconds / 1e12
    return {"kv": name, "us": 1e6 * seconds, "tb_per_s": rate, "error": error}


def measure(args: argparse.Namespace, device: Device) -> Iterator[dict[str, Any]]:
    """All shapes and schemes."""
    for shape in parse_shapes(args.shape):
        for name in args.kv.split(","):
            yield {"shape": str(shape), **measured(args.directory, name, shape.lengths(64), device)}


if __name__ == "__main__":
    main(__doc__ or "", {"shape": "1x32768", "kv": "int4,none"}, kernels, measure)
