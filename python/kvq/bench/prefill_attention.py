"""``kvq bench attention --prefill``: attention of whole prompts over one layer's cache on a GPU, alone.

A step has all rows of its sequences. Rows read the sealed pages before their own, which hold what the same
step sealed, and the rows of their own page. Some rows and heads are compared with numpy over the dequantized
cache; a figure is the median of single launches between two events.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from kvq.bench.attention import TOLERANCE, Geometry, Shape
from kvq.bench.attention_kernels import kernel_path, read_kernel, write_kernel
from kvq.bench.attention_peers import torch_with_cuda
from kvq.bench.cuda_graph import Driver
from kvq.errors import ConfigError, LibraryError
from kvq.layout import KVLayout
from kvq.quantization import kv_codec
from kvq.quantization.scheme import KVQuantization
from kvq.runtime.device import Device

DEFAULT_SHAPES = "1x2048,1x8192,1x32768"
REPLAYS = 10
_UNITS, _SAMPLES = 64, 24


class PrefillCase:
    """Host tensors of a step that has all rows of ``shape.batch`` prompts; arguments of the kernel, numpy.

    Parameters
    ----------
    layout : KVLayout
        Of one layer, in the order ``fragments``.
    num_heads : int
        Query heads.
    shape : Shape
    tile_rows : int
        Most rows of a task.
    """

    def __init__(self, layout: KVLayout, num_heads: int, shape: Shape, tile_rows: int, seed: int = 0) -> None:
        self.layout, self.num_heads = layout, num_heads
        rng = np.random.default_rng(seed)
        page, dim, heads = layout.page_size, layout.head_dim, layout.num_kv_heads
        self.lengths = shape.lengths(page)
        offset = rng.standard_normal(dim) * 2
        k = (rng.standard_normal((_UNITS, page, dim)) + offset).astype(np.float16)
        v = (rng.standard_normal((_UNITS, page, dim)) * rng.uniform(0.1, 1, (_UNITS, 1, 1))).astype(
            np.float16
        )
        units = kv_codec.seal_unit(k, v, layout)
        self._decoded = kv_codec.unpack_unit(units, layout)
        self._raw = np.stack([k, v], axis=1)
        counts = [-(-n // page) for n in self.lengths]
        self.starts = np.concatenate([[0], np.cumsum(counts)])
        pages = int(self.starts[-1])
        self._which = rng.integers(0, _UNITS, (pages, heads))
        self.table = rng.permutation(pages).astype(np.int32)
        self.pool = np.empty(layout.pool_shape(pages), np.uint32)
        self.pool[self.table, 0] = units[self._which]
        self.workspace = self._raw[self._which].reshape(layout.workspace_shape(pages))
        self.rows = np.full(layout.open_shape(1), np.nan, np.float16)
        self.positions = np.concatenate([np.arange(n) for n in self.lengths]).astype(np.int32)
        self.q = rng.standard_normal((len(self.positions), num_heads, dim)).astype(np.float32) * dim**-0.5
        tasks, row = [], 0
        for start, length in zip(self.starts, self.lengths, strict=False):
            for first in range(0, length, page):
                index, end = first // page, min(first + page, length)
                for begin in range(first, end, tile_rows):
                    stop = min(begin + tile_rows, end)
                    task = (row + begin, row + stop, start, 1 + start + index, 0, index // 4 + 1, -1)
                    tasks.append((index, task))
            row += length
        tasks.sort(key=lambda entry: -entry[0])  # longest first
        self.tasks = np.array([task for _, task in tasks], np.int32)
        self.counts = np.array([0, 0, len(tasks), 0], np.int32)

    @property
    def operations(self) -> float:
        """Floating-point operations of the two products, over the keys that rows see."""
        seen = int((self.positions.astype(np.int64) + 1).sum())
        return 4.0 * self.layout.head_dim * self.num_heads * seen

    def error(self, out: np.ndarray) -> float:
        """Largest relative error, in the norm, of some rows and KV heads of what a kernel wrote."""
        layout, page = self.layout, self.layout.page_size
        group, worst = self.num_heads // layout.num_kv_heads, 0.0
        if not np.isfinite(out).all():
            return float("nan")
        rng = np.random.default_rng(1)
        firsts = np.concatenate([[0], np.cumsum(self.lengths)])
        for _ in range(_SAMPLES):
            row, head = int(rng.integers(len(out))), int(rng.integers(layout.num_kv_heads))
            sequence = int(np.searchsorted(firsts, row, side="right")) - 1
            position = row - int(firsts[sequence])
            start = self.starts[sequence]
            which = self._which[start : start + position // page + 1, head]
            parts = []
            for i, name in enumerate(("k", "v")):
                sealed = self._decoded[name][which[:-1]].reshape(-1, layout.head_dim)
                own = self._raw[which[-1], i, : position % page + 1].astype(np.float32)
                parts.append(np.concatenate([sealed, own]))
            scores = self.q[row, head * group : (head + 1) * group] @ parts[0].T
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            expected = weights / weights.sum(axis=1, keepdims=True) @ parts[1]
            if layout.v_bits is not None:
                expected = expected @ kv_codec.hadamard(layout.head_dim)
            found = out[row, head * group : (head + 1) * group].astype(np.float32)
            worst = max(worst, float(np.linalg.norm(found - expected) / np.linalg.norm(expected)))
        return worst


@dataclass(frozen=True)
class PrefillFigure:
    """One measurement; the fields are keys of ``--json``. Times are of one layer, in microseconds."""

    kv: str
    shape: str
    heads: str
    us: float
    fastest: float
    slowest: float
    tflops: float
    error: float | None

    @classmethod
    def of(
        cls,
        kv: str,
        shape: Shape,
        geometry: Geometry,
        times: Sequence[float],
        operations: float,
        error: float | None = None,
    ) -> PrefillFigure:
        """From the seconds of the launches and the operations of one."""
        middle = statistics.median(times)
        heads = f"{geometry.num_heads}/{geometry.num_kv_heads}x{geometry.head_dim}"
        return cls(
            kv,
            str(shape),
            heads,
            middle * 1e6,
            min(times) * 1e6,
            max(times) * 1e6,
            operations / middle / 1e12,
            error,
        )

    def to_dict(self) -> dict[str, float | str | None]:
        """A JSON-ready description."""
        return asdict(self)


def compile_prefill(directory: Path, layout: KVLayout, num_heads: int, archs: str | None) -> None:
    """Compile the kernel into ``directory``, for ``archs`` (``--cuda-arch``) or for this machine's GPU."""
    from kvq.compiler.target import cuda_target

    target = cuda_target(archs)
    func = target.kernels.paged_attention(layout, num_heads, "float16")
    about = {"tile_rows": target.kernels.attention_shape(layout, num_heads).tile_rows}
    write_kernel(kernel_path(directory, "prefill", layout, num_heads), func, target, about)


def bench_prefill(
    schemes: Sequence[KVQuantization],
    shapes: Sequence[Shape],
    geometry: Geometry,
    page_size: int,
    kernels: Path,
    peers: Sequence[str] = (),
    report: Callable[[str], None] = lambda _: None,
) -> list[PrefillFigure]:
    """Measure every scheme at every shape, and PyTorch's flash attention if ``peers`` names ``torch``.

    Raises
    ------
    LibraryError
        If there is no CUDA device, or a kernel computes something else.
    """
    if set(peers) - {"torch"}:
        raise ConfigError("--prefill compares with --peer torch alone: PyTorch's flash attention")
    device, driver, figures = Device.open("cuda"), Driver(), []
    for kv in schemes:
        report(f"{kv}: kernel")
        layout, heads = geometry.layout(kv, page_size), geometry.num_heads
        path = kernel_path(kernels, "prefill", layout, heads)
        kernel, about = read_kernel(path, partial(compile_prefill, kernels, layout, heads, None))
        for shape in shapes:
            report(f"{kv} {shape}")
            case = PrefillCase(layout, heads, shape, about["tile_rows"])
            times, out = _run(kernel, case, device, driver)
            error = case.error(out)
            if not error <= TOLERANCE:
                raise LibraryError(f"prefill over {kv} at {shape} is wrong: relative error {error:.1e}")
            figures.append(PrefillFigure.of(str(kv), shape, geometry, times, case.operations, error))
    for shape in shapes if peers else ():
        report(f"torch flash {shape}")
        times, operations = _torch_flash(shape, geometry, page_size)
        figures.append(PrefillFigure.of("torch flash fp16", shape, geometry, times, operations))
    return figures


def _run(kernel: Any, case: PrefillCase, device: Device, driver: Driver) -> tuple[list[float], np.ndarray]:
    def tensor(array: np.ndarray) -> Any:
        return tvm.runtime.tensor(np.ascontiguousarray(array), device=device.handle)

    scratch = np.zeros((1, case.num_heads, case.layout.head_dim + 8), np.float32)
    out = tensor(np.full(case.q.shape, np.nan, np.float16))
    merges = np.zeros((1, 3), np.int32)
    first = [tensor(x) for x in (case.q, case.pool, case.workspace, case.positions, case.table)]
    second = [tensor(x) for x in (case.counts, case.tasks, merges)]
    arguments = [*first, *second, 0, tensor(case.rows), tensor(scratch), out]

    def launch() -> None:
        with tvm_ffi.use_raw_stream(device.handle, driver.stream.value or 0):
            kernel(*arguments)

    times = driver.time(launch, REPLAYS)
    driver.synchronize()
    return times, np.asarray(out.numpy())


def _torch_flash(shape: Shape, geometry: Geometry, page_size: int) -> tuple[list[float], float]:
    """Seconds and operations of PyTorch's flash attention, causal, in fp16, on contiguous rows."""
    torch = torch_with_cuda()
    length, dim = max(shape.lengths(page_size)), geometry.head_dim
    make = {"device": "cuda", "dtype": torch.float16}
    q = torch.randn(shape.batch, geometry.num_heads, length, dim, **make)
    k, v = (torch.randn(shape.batch, geometry.num_kv_heads, length, dim, **make) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    grouped = geometry.num_heads != geometry.num_kv_heads
    seconds = []
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        for i in range(REPLAYS + 3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            attend(q, k, v, is_causal=True, enable_gqa=grouped)
            end.record()
            end.synchronize()
            if i >= 3:
                seconds.append(start.elapsed_time(end) / 1e3)
    operations = 4.0 * dim * geometry.num_heads * shape.batch * length * (length + 1) / 2
    return seconds, operations
