"""How a matrix-vector product is cut into blocks and warps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .block import WARP, overlaps
from .weight_fragments import UNIT, tiles

#: Multiprocessors that blocks are dealt to, about.
MULTIPROCESSORS = 132
#: Inputs from which a block's rows leave no room for a second block.
LONG = 8192


@dataclass(frozen=True)
class GemvTuning:
    """How the kernel is cut; it changes the speed, and the order of sums.

    Attributes
    ----------
    warps : int
        Warps that share the inputs, 4 or more.
    tiles : int
        Tiles that a warp multiplies at a time by the same inputs; of a gated product half of them are of the
        second half of the outputs.
    passes : int
        How often a block does that, for other tiles.
    ahead : int
        Units, of all tiles, that a warp has under way.
    overlap : bool
        Start while the kernel before is running (sm_90 and newer).
    """

    warps: int
    tiles: int
    passes: int
    ahead: int
    overlap: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARP * self.warps


def gemv_tuning(
    n_out: int, k: int, storage: str, gated: bool, archs: Sequence[str], dtype: str = "float16"
) -> GemvTuning:
    """The tuning for GPUs of every one of ``archs`` (``sm_90`` and the like), measured on an H200.

    ``dtype`` is that of the operands.
    """
    overlap = overlaps(archs)
    lines = tiles(n_out) // 2 if gated else tiles(n_out)
    share = -(-lines // MULTIPROCESSORS)
    if storage != "int4":
        at_once = 2 if gated else 1
        return GemvTuning(16, at_once, share, 2 // at_once, overlap)
    if gated or share > 3:
        # many tiles: all warps of a multiprocessor in one block, so that rows are made once. In bf16 a code
        # takes longer, and fewer warps with more units ahead are faster
        warps = 32 if k // UNIT >= 32 and dtype == "float16" else 16
        return GemvTuning(warps, 2, share if gated else -(-share // 2), 64 // warps, overlap)
    if share == 2 and k < LONG:
        return GemvTuning(16, 1, 1, 2, overlap)  # two blocks
    # three units of three tiles are too much for ptxas in bf16: it spills, which takes six times as long
    return GemvTuning(16, share, 1, 2 if share == 3 and dtype == "bfloat16" else 3, overlap)
