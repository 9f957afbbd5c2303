"""A decode step's cache with real contents, and what attention must make of it: numpy, no device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvq.layout import KVLayout
from kvq.quantization import kv_codec
from kvq.runtime.decode_plan import DecodeDevice, plan_decode

#: Different units that the pool is made of: enough that no two neighbours are alike, few enough to make
#: quickly.
_UNITS = 192
#: Pool pages that no sequence has, full of words that decode to NaN.
_STALE_PAGES = 7


class AttentionCase:
    """Host tensors of a decode step.

    Parameters
    ----------
    layout : KVLayout
        Of one layer, in the order ``fragments``.
    num_heads : int
        Query heads.
    lengths : sequence of int
        Tokens of each sequence, the query's own included.
    device : DecodeDevice
        What the plan is made for.
    seed : int
        Of the contents.
    scratch_slots : int
        Room for partial results.
    value_size : float
        Standard deviation of the largest values.

    Attributes
    ----------
    q, pool, rows, positions, table, counts, tasks, scratch
        Arguments of the kernel, numpy.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_heads: int,
        lengths: Sequence[int],
        device: DecodeDevice,
        seed: int = 0,
        scratch_slots: int = 1024,
        value_size: float = 1.0,
    ) -> None:
        self.layout, self.num_heads, self.lengths = layout, num_heads, list(lengths)
        rng = np.random.default_rng(seed)
        batch, page, dim, heads = len(lengths), layout.page_size, layout.head_dim, layout.num_kv_heads
        self.scale = dim**-0.5
        self.q = (rng.standard_normal((batch, num_heads, dim)) * self.scale).astype(np.float32)
        self.positions = np.array(lengths, np.int32) - 1
        sealed = self.positions // page
        # keys with an offset a channel, as real ones have; values of all sizes
        offset = rng.standard_normal(dim) * 2
        k = (rng.standard_normal((_UNITS, page, dim)) + offset).astype(np.float16)
        sizes = rng.uniform(0.1, 1, (_UNITS, 1, 1)) * value_size
        v = kv_codec.sanitize((rng.standard_normal((_UNITS, page, dim)) * sizes).astype(np.float32))
        self._units = kv_codec.seal_unit(k, v, layout)
        self._decoded: dict[str, np.ndarray] | None = None
        pages = int(sealed.sum()) + _STALE_PAGES
        order = rng.permutation(pages).astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(sealed)])
        self.starts, self.table = starts, order[: max(1, starts[-1])]
        self._which = rng.integers(0, _UNITS, (pages, 1, heads))
        self.pool = self._units[self._which]
        self.pool[order[int(sealed.sum()) :]] = 0xFFFFFFFF
        row_pages = rng.permutation(batch + 1)[:batch]
        rows = np.full((batch + 1, 1, heads, 2, page, dim), np.nan, np.float16)
        for i, row_page in enumerate(row_pages):
            own = int(self.positions[i]) % page + 1
            drawn = rng.standard_normal((1, heads, 2, own, dim)).astype(np.float32)
            drawn[:, :, 1] *= value_size
            rows[row_page, ..., :own, :] = kv_codec.sanitize(drawn)
        self.rows = rows.reshape(layout.open_shape(batch + 1))
        self._row_pages = row_pages
        requests = [(int(starts[i]), int(row_pages[i]), int(self.positions[i])) for i in range(batch)]
        self.tasks = plan_decode(tuple(requests), page, device, scratch_slots)
        self.counts = np.array([0, 0, len(self.tasks), 0], np.int32)
        self.scratch = np.full((scratch_slots, num_heads, dim + 8), np.nan, np.float32)
        self.scratch[:, :, dim + 2] = 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of one layer's cache that a step must read: sealed pages, and the rows seen of open pages."""
        layout, page = self.layout, self.layout.page_size
        own = int((self.positions % page + 1).sum())
        sealed = int((self.positions // page).sum())
        return layout.num_kv_heads * (sealed * layout.unit_words * 4 + own * layout.head_dim * 4)

    def answer(self, row: int, head: int) -> np.ndarray:
        """Attention of one row and KV head in float32, over the dequantized cache: ``[group, D]``."""
        layout, page = self.layout, self.layout.page_size
        if self._decoded is None:
            self._decoded = kv_codec.unpack_unit(self._units, layout)
        which = self._which[self.table[self.starts[row] : self.starts[row + 1]], 0, head]
        own = int(self.positions[row]) % page + 1
        raw = self.rows[self._row_pages[row], 0, head].reshape(2, page, -1)[:, :own].astype(np.float32)
        k, v = (
            np.concatenate([self._decoded[name][which].reshape(-1, layout.head_dim), raw[i]])
            for i, name in enumerate(("k", "v"))
        )
        group = self.num_heads // layout.num_kv_heads
        scores = self.q[row, head * group : (head + 1) * group] @ k.T
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out = weights / weights.sum(axis=1, keepdims=True) @ v
        return out @ kv_codec.hadamard(layout.head_dim) if layout.v_bits is not None else out

    def error(self, out: np.ndarray, samples: int, seed: int = 0) -> float:
        """Largest relative error, in the norm, of some rows and KV heads of what a kernel wrote.

        NaN if any element was not written.
        """
        if not np.isfinite(out.astype(np.float32)).all():
            return float("nan")
        heads = self.layout.num_kv_heads
        group, worst = self.num_heads // heads, 0.0
        for pick in np.random.default_rng(seed).permutation(len(self.lengths) * heads)[:samples]:
            row, head = divmod(int(pick), heads)
            expected = self.answer(row, head)
            found = out[row, head * group : (head + 1) * group].astype(np.float32)
            worst = max(worst, float(np.linalg.norm(found - expected) / np.linalg.norm(expected)))
        return worst
