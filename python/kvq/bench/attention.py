"""``kvq bench attention``: decode attention of one layer on a GPU, alone.

Correct first: some rows and heads of every shape are compared with numpy over the dequantized cache, outputs
start as NaN, pages lie scattered, stale pages and rows hold NaN. Then CUDA graphs are replayed that rotate
over enough layers to leave the L2 cache behind; a figure is the median of the replays over the launches in
one. The bytes that a step must read, over the time, are compared with a copy within the device's memory in
the same run.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from kvq.bench.attention_case import AttentionCase
from kvq.bench.attention_kernels import kernel_path, read_kernel, write_kernel
from kvq.bench.attention_peers import PEERS, PeerCase, check_peers, peer_times
from kvq.bench.cuda_graph import Driver
from kvq.errors import ConfigError, LibraryError
from kvq.layout import KVLayout
from kvq.quantization.scheme import KVQuantization
from kvq.runtime.decode_plan import DecodeDevice
from kvq.runtime.device import Device

#: The shapes of Llama-3-8B, and those that are measured if nobody says otherwise.
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DEFAULT_SHAPES = "1x131072,64x2048h,8x8192,20x2148,1x8192,64x8192,64x8192r,8x131072"
#: Bytes that a rotation reads at least, several times the largest L2 cache.
ROTATION_BYTES = 400_000_000
#: Launches of a graph at least, and replays.
LAUNCHES, REPLAYS = 24, 20
#: Largest relative error of a kernel that is worth timing.
TOLERANCE = 5e-3
_SAMPLES = 24


@dataclass(frozen=True)
class Shape:
    """A decode step: ``batch`` sequences of ``length`` tokens.

    ``kind`` is empty (all equal), ``h`` (equal, open pages half full) or ``r`` (lengths drawn from 1 to
    ``length``).
    """

    batch: int
    length: int
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.batch}x{self.length}{self.kind}"

    def lengths(self, page_size: int) -> list[int]:
        """Tokens of each sequence."""
        if self.kind == "r":
            drawn = np.random.default_rng(7).integers(1, self.length + 1, self.batch)
            return [int(n) for n in drawn]
        return [self.length - (page_size // 2 if self.kind == "h" else 0)] * self.batch


def parse_shapes(text: str) -> list[Shape]:
    """Read ``1x8192,64x2048h,64x8192r``.

    Raises
    ------
    ConfigError
        For anything else.
    """
    shapes = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)x(\d+)([hr]?)", part.strip())
        if found is None or not int(found[1]) or int(found[2]) < 64:
            raise ConfigError(
                f"--shape {part.strip()!r} is not BATCHxLENGTH of 64 tokens or more, with h for half-full "
                "open pages or r for ragged: such as 64x8192r"
            )
        shapes.append(Shape(int(found[1]), int(found[2]), found[3]))
    return shapes


@dataclass(frozen=True)
class Geometry:
    """Heads of the attention that is measured."""

    num_heads: int = HEADS
    num_kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM

    def layout(self, kv: KVQuantization, page_size: int) -> KVLayout:
        """One layer's cache."""
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"--heads {self.num_heads} must be a multiple of --kv-heads {self.num_kv_heads}"
            )
        bits = kv.k_bits, kv.v_bits
        return KVLayout(1, self.num_kv_heads, self.head_dim, *bits, page_size, order="fragments")


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel, and what plan and report must know of it."""

    function: Callable[..., None]
    layout: KVLayout
    num_heads: int
    warps: int
    blocks_per_sm: int

    def device(self, multiprocessors: int) -> DecodeDevice:
        """What the plan is made for."""
        blocks = self.blocks_per_sm * multiprocessors
        return DecodeDevice.of(self.layout, self.num_heads, blocks, self.warps)


@dataclass(frozen=True)
class Figure:
    """One measurement; the fields are keys of ``--json``. Times are of one layer, in microseconds."""

    kv: str
    shape: str
    heads: str
    us: float
    fastest: float
    slowest: float
    tb_per_s: float
    of_copy: float
    error: float | None

    @classmethod
    def of(
        cls,
        kv: str,
        shape: Shape,
        geometry: Geometry,
        times: Sequence[float],
        cache_bytes: int,
        copy_rate: float,
        error: float | None = None,
    ) -> Figure:
        """From the seconds of the replays and the bytes that one launch must read."""
        middle = statistics.median(times)
        rate = cache_bytes / middle
        return cls(
            kv,
            str(shape),
            f"{geometry.num_heads}/{geometry.num_kv_heads}x{geometry.head_dim}",
            middle * 1e6,
            min(times) * 1e6,
            max(times) * 1e6,
            rate / 1e12,
            rate / copy_rate,
            error,
        )

    def to_dict(self) -> dict[str, float | str | None]:
        """A JSON-ready description."""
        return asdict(self)


def compile_kernel(directory: Path, layout: KVLayout, num_heads: int, archs: str | None) -> None:
    """Compile a kernel into ``directory``, for ``archs`` (``--cuda-arch``) or for this machine's GPU."""
    from kvq.compiler.target import cuda_target
    from kvq.schedules.cuda.paged_attention import decode_tuning, paged_attention_decode

    target = cuda_target(archs)
    tuning = decode_tuning(layout, num_heads, target.archs)
    func = paged_attention_decode(layout, num_heads, "float16", tuning)
    about = {"warps": tuning.warps, "blocks_per_sm": tuning.blocks_per_sm}
    write_kernel(kernel_path(directory, "decode", layout, num_heads), func, target, about)


def load_kernel(directory: Path, layout: KVLayout, num_heads: int) -> Kernel:
    """Load a kernel from ``directory``, compiled now if it is not there."""
    path = kernel_path(directory, "decode", layout, num_heads)
    function, about = read_kernel(path, lambda: compile_kernel(directory, layout, num_heads, None))
    return Kernel(function, layout, num_heads, about["warps"], about["blocks_per_sm"])


class AttentionRun:
    """A kernel on a case, on the device: several copies of the cache, which stand for layers."""

    def __init__(self, kernel: Kernel, case: AttentionCase, device: Device, copies: int = 1) -> None:
        self.kernel, self.case, self.device = kernel, case, device
        self._out = self._tensor(np.full(case.q.shape, np.nan, np.float16))
        workspace = np.zeros(case.layout.workspace_shape(1), np.float16)
        fixed = (case.positions, case.table, case.counts, case.tasks, np.zeros((1, 3), np.int32))
        self._head = [self._tensor(x) for x in (case.q, workspace)]
        self._fixed = [self._tensor(x) for x in fixed]
        self._scratch = self._tensor(case.scratch)
        self._pools = [self._tensor(case.pool) for _ in range(copies)]
        self._rows = [self._tensor(case.rows) for _ in range(copies)]

    def _tensor(self, array: np.ndarray) -> Any:
        return tvm.runtime.tensor(array, device=self.device.handle)

    def launch(self, copy: int = 0) -> None:
        """Put the kernel on the current stream."""
        q, workspace = self._head
        pool, rows = self._pools[copy], self._rows[copy]
        self.kernel.function(q, pool, workspace, *self._fixed, 0, rows, self._scratch, self._out)

    def output(self, copy: int = 0) -> np.ndarray:
        """What the kernel writes over NaN: float16 ``[batch, Hq, D]``."""
        self._out.copyfrom(np.full(self.case.q.shape, np.nan, np.float16))
        self.launch(copy)
        self.device.synchronize()
        return np.asarray(self._out.numpy())

    def times(self, driver: Driver) -> list[float]:
        """Seconds of a launch, one figure a replay."""
        copies = len(self._pools)
        rounds = -(-LAUNCHES // copies)

        def launch_all() -> None:
            for _ in range(rounds):
                for copy in range(copies):
                    self.launch(copy)

        times = driver.time_replays(self.device.handle, launch_all, REPLAYS)
        return [t / (rounds * copies) for t in times]


def copies_for(cache_bytes: int) -> int:
    """Layers to rotate over."""
    return max(2, -(-ROTATION_BYTES // max(1, cache_bytes))) if cache_bytes < ROTATION_BYTES else 1


def bench_attention(
    schemes: Sequence[KVQuantization],
    shapes: Sequence[Shape],
    geometry: Geometry,
    page_size: int,
    kernels: Path,
    peers: Sequence[str] = (),
    report: Callable[[str], None] = lambda _: None,
) -> tuple[list[Figure], float]:
    """Measure every scheme at every shape.

    Parameters
    ----------
    schemes, shapes, geometry, page_size
        What to measure.
    kernels : Path
        Directory of compiled kernels; what is missing is compiled.
    peers : sequence of str
        Keys of :data:`kvq.bench.attention_peers.PEERS`.
    report : callable
        Called with what is being done.

    Returns
    -------
    figures : list of Figure
    copy_rate : float
        Bytes a second, read and written, of a copy within the device's memory.

    Raises
    ------
    LibraryError
        If there is no CUDA device, or a kernel computes something else.
    """
    check_peers(peers)
    device = Device.open("cuda")
    driver = Driver()
    multiprocessors = int(device.handle.multi_processor_count)
    copy_rate = driver.copy_rate()
    figures = []
    for kv in schemes:
        report(f"{kv}: kernel")
        kernel = load_kernel(kernels, geometry.layout(kv, page_size), geometry.num_heads)
        for shape in shapes:
            report(f"{kv} {shape}")
            lengths = shape.lengths(page_size)
            case = AttentionCase(kernel.layout, geometry.num_heads, lengths, kernel.device(multiprocessors))
            run = AttentionRun(kernel, case, device, copies_for(case.cache_bytes))
            error = case.error(run.output(), _SAMPLES)
            if not error <= TOLERANCE:
                raise LibraryError(f"attention over {kv} at {shape} is wrong: relative error {error:.1e}")
            times, size = run.times(driver), case.cache_bytes
            figures.append(Figure.of(str(kv), shape, geometry, times, size, copy_rate, error))
    heads = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
    for label, peer, bits in (entry for name in peers for entry in PEERS[name]):
        for shape in shapes:
            report(f"{label} {shape}")
            lengths = shape.lengths(page_size)
            values = 2 * geometry.num_kv_heads * geometry.head_dim * sum(lengths)
            size = int(values * bits(geometry.head_dim) / 8)
            times = peer_times(
                peer, PeerCase(lengths, *heads, copies_for(size), page_size), LAUNCHES, REPLAYS
            )
            if times:
                figures.append(Figure.of(label, shape, geometry, times, size, copy_rate))
    return figures, copy_rate
