"""How a product of many rows is cut into blocks and warps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .block import WARP, arch_number, overlaps
from .tile_copies import stage_bytes
from .weight_fragments import TILE, tiles

#: Rows up to which blocks are as high as few rows need.
SOME_ROWS = 128
#: Outputs of a weight that are enough for wide blocks on every multiprocessor.
WIDE = 16384
#: The architecture whose warps multiply in fours.
WGMMA_ARCH = "sm_90a"
#: Tiles of a weight that are blocks of four for half of its multiprocessors: two blocks share inputs then.
FEW_TILES = 4 * 66
#: KiB of shared memory that a block may take, by architecture; of others it is 99.
SHARED_KIB = {80: 160, 87: 160, 90: 224, 100: 224, 103: 224}


@dataclass(frozen=True)
class TileTuning:
    """How the kernel is cut; it changes the speed, and the order of sums where inputs are shared.

    Attributes
    ----------
    output_tiles, row_tiles : int
        Tiles of 16 outputs and of 8 rows of a warp.
    output_warps, row_warps, input_warps : int
        Warps that share a block's outputs, rows and inputs.
    stages : int
        Places for ``input_warps`` neighbouring units in shared memory.
    splits : int
        Blocks, 1 or 2, that share the inputs; two are a cluster, which takes sm_90.
    overlap : bool
        Start while the kernel before is running (sm_90 and newer).
    wgmma : bool
        Whether warps multiply in fours (sm_90a): then output_warps is a multiple of 4 and row_warps is 1.
    """

    output_tiles: int
    row_tiles: int
    output_warps: int
    row_warps: int
    input_warps: int
    stages: int
    splits: int = 1
    overlap: bool = False
    wgmma: bool = False

    @property
    def outputs(self) -> int:
        """Outputs of a block."""
        return TILE * self.output_tiles * self.output_warps

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 8 * self.row_tiles * self.row_warps

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARP * self.output_warps * self.row_warps * self.input_warps


def tile_tuning(n_out: int, storage: str, most_rows: int | None, archs: Sequence[str]) -> TileTuning:
    """The tuning for GPUs of every one of ``archs``, measured on an H200."""
    tuning = _cut(n_out, most_rows, archs)
    exchanged = 4 * tuning.outputs * tuning.rows // 2 if tuning.splits > 1 else 0
    room = (min(SHARED_KIB.get(arch_number(arch), 99) for arch in archs) << 10) - exchanged
    stage = stage_bytes(storage, tuning.outputs // TILE, tuning.rows, tuning.input_warps)
    return replace(tuning, stages=min(tuning.stages, room // stage))


def _cut(n_out: int, most_rows: int | None, archs: Sequence[str]) -> TileTuning:
    """The tuning where shared memory is enough."""
    overlap, few = overlaps(archs), tiles(n_out) <= FEW_TILES
    # a block reads its rows for its outputs alone: with many outputs, wide blocks spare the cache
    if set(archs) == {WGMMA_ARCH}:
        if most_rows is None:
            return TileTuning(2, 16, 8, 1, 1, 6, overlap=overlap, wgmma=True)
        if n_out >= WIDE:
            return TileTuning(2, 8, 4, 1, 1, 6, overlap=overlap, wgmma=True)
        return TileTuning(1, 8, 4, 1, 4, 4, splits=2 if few else 1, overlap=overlap, wgmma=True)
    if most_rows is None:
        return TileTuning(4, 8, 2, 2, 1, 4, overlap=overlap)
    if n_out >= WIDE:
        return TileTuning(4, 8, 2, 1, 2, 3, overlap=overlap)
    if overlap and few:
        return TileTuning(2, 8, 2, 1, 4, 3, splits=2, overlap=True)
    return TileTuning(2, 8, 1, 1, 4, 3, overlap=overlap)
