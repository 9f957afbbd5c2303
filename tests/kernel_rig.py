"""Drives the cache's kernels step by step, beside a numpy oracle that holds every row."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm

from kvq.layout import KVLayout
from kvq.quantization import kv_codec
from kvq.quantization.storage import STORAGES, PackedRows
from kvq.runtime.kv_cache import PagedKVCache
from kvq.runtime.step_plan import StepPlan, build_step
from kvq.schedules.attention_variant import PLAIN, AttentionVariant


def on_tensors(func: Any, arguments: tuple[Any, ...], device: Any = None) -> None:
    """Call a function of TVM tensors with numpy arrays; whatever it wrote is in the arrays afterwards."""
    given = [
        tvm.runtime.tensor(np.ascontiguousarray(a), device) if isinstance(a, np.ndarray) else a
        for a in arguments
    ]
    func(*given)
    for array, tensor in zip(arguments, given, strict=True):
        if isinstance(array, np.ndarray) and array.flags.writeable:
            array[...] = tensor.numpy()


@dataclass(frozen=True)
class CacheKernels:
    """What a step runs, in its order, and how attention is cut; kernels take numpy arrays."""

    append: Callable[..., None]
    seal: Callable[..., None]
    attend: Callable[..., None]
    carry: Callable[..., None]
    split_pages: int
    tile_rows: int
    scratch_extra: int


class CacheRig:
    """One layer of a model's cache, ``layer`` of ``layout.num_layers``; ``backend`` is the CPU by default.

    ``decode`` is the attention of steps with a row a sequence, if not that of all steps.
    """

    def __init__(
        self,
        layout: KVLayout,
        group: int,
        *,
        layer: int = 0,
        num_pages: int = 40,
        num_open: int = 4,
        threads: int = 2,
        slots: int = 64,
        backend: Any = None,
        seed: int = 0,
        variant: AttentionVariant = PLAIN,
        query_gain: float = 1.0,
        decode: Callable[..., None] | None = None,
    ) -> None:
        self.layout, self.layer, self.threads = layout, layer, threads
        self.variant, self.query_gain, self.decode = variant, query_gain, decode
        self.num_heads = group * layout.num_kv_heads
        self.kernels = self.build_kernels(backend)
        self.rng = np.random.default_rng(seed)
        self.sinks = self.rng.standard_normal(self.num_heads).astype(np.float32)
        num_workspace = 12
        # stale contents: NaN rows and random words must never be seen
        self.pool = self.rng.integers(0, 2**32, layout.pool_shape(num_pages), dtype=np.uint32)
        self.open = np.full(layout.open_shape(num_open), np.nan, layout.row_dtype)
        self.workspace = np.full(layout.workspace_shape(num_workspace), np.nan, layout.row_dtype)
        width = layout.head_dim + self.kernels.scratch_extra
        self.scratch = np.full((max(slots, 1), self.num_heads, width), np.nan, np.float32)
        self.cache = PagedKVCache(layout, num_pages, num_open, num_workspace, self._copy_open, variant.window)
        pages = [self.cache.pool.allocate() for _ in range(num_pages)]
        for page in self.rng.permutation(pages):  # what is given out next lies scattered
            self.cache.pool.release(int(page))
        shape = self.kernels.split_pages, slots, self.kernels.tile_rows
        self.plan = StepPlan(self.cache, 1024, num_pages * num_open, *shape)
        self.rows: dict[Hashable, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
        self.sealed: dict[tuple[Hashable, int], tuple[np.ndarray, np.ndarray]] = {}

    def build_kernels(self, backend: Any) -> CacheKernels:
        from kernel_backends import CPU, cache_kernels

        return cache_kernels(backend or CPU, self.layout, self.num_heads, self.variant)

    def _copy_open(self, src: int, dst: int) -> None:
        self.open[dst] = self.open[src]

    def random_rows(self, n: int) -> np.ndarray:
        """qkv float32 ``[n, Hq + 2 H, D]``."""
        total = self.num_heads + 2 * self.layout.num_kv_heads
        rows = self.rng.standard_normal((n, total, self.layout.head_dim))
        rows[:, : self.num_heads] *= self.query_gain
        return rows.astype(np.float32)

    def step(self, requests: list[tuple[Hashable, int]], qkv: np.ndarray) -> np.ndarray:
        """Run a step and return its output, float32 ``[n, Hq, D]``."""
        layout, plan = self.layout, build_step(self.plan, requests, self.threads)
        n, kernels = plan.num_rows, self.kernels
        rope = np.zeros((n, layout.head_dim), np.float32)
        rope[:, : layout.head_dim // 2] = 1
        q = np.full((n, self.num_heads, layout.head_dim), np.nan, np.float32)
        out, faults, counts = q.copy(), plan.kv_faults, plan.plan_counts
        kernels.append(qkv, rope, plan.append_slots[:n], self.layer, self.open, self.workspace, faults, q)
        self.faults = faults[:n].copy()
        self._record(requests, plan.append_slots[:n], q)
        kernels.seal(q, self.open, self.workspace, counts, plan.seal_tasks, self.layer, self.pool)
        sinks = [self.sinks] if self.variant.sinks else []
        decodes = self.decode is not None and all(count == 1 for _, count in requests)
        attend = self.decode if decodes else kernels.attend
        attend(
            q, self.pool, self.workspace, plan.positions[:n], plan.page_table, counts, plan.attention_tasks,
            plan.merge_tasks, *sinks, self.layer, self.open, self.scratch, out,
        )  # fmt: skip
        kernels.carry(self.workspace, counts, plan.carry_tasks, self.layer, self.open)
        plan.commit()
        return out

    def _record(self, requests: list[tuple[Hashable, int]], slots: np.ndarray, q: np.ndarray) -> None:
        """Keep what ``kv_append`` made: rows of K, V (rotated if quantized) and Q, ``[H, (group,) D]``."""
        layout, rows = self.layout, []
        opened, workspace = self.open[:, self.layer], self.workspace
        for slot, queries in zip(slots, q, strict=True):
            page, offset = divmod(int(slot), layout.page_size)
            unit = opened[page] if page < len(opened) else workspace[page - len(opened)]
            if layout.order == "lanes":
                k = unit[:, 0].reshape(-1, layout.head_dim, layout.page_size)[:, :, offset]
            else:
                k = unit[:, 0].reshape(-1, layout.page_size, layout.head_dim)[:, offset]
            v = unit[:, 1].reshape(-1, layout.page_size, layout.head_dim)[:, offset]
            rows.append((k.copy(), v.copy(), queries.reshape(layout.num_kv_heads, -1, layout.head_dim)))
        at = 0
        for sequence, count in requests:
            self.rows.setdefault(sequence, []).extend(rows[at : at + count])
            at += count

    def append(
        self, requests: list[tuple[Hashable, int]], qkv: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run a step of random rows; returns the output and what the oracle says of it."""
        qkv = self.random_rows(sum(n for _, n in requests)) if qkv is None else qkv
        for sequence, _ in requests:
            if sequence not in self.rows:
                self.cache.add_sequence(sequence)
        out = self.step(requests, qkv)
        heads, kv_heads = self.num_heads, self.layout.num_kv_heads
        values = qkv[:, heads + kv_heads :]
        if self.layout.v_bits is not None:
            values = values @ kv_codec.hadamard(self.layout.head_dim)
        expected, at = np.empty_like(out), 0
        for sequence, count in requests:
            rows = self.rows[sequence]
            for i, row in enumerate(range(at, at + count)):
                position = len(rows) - count + i
                for stored, given in zip(
                    rows[position][:2], (qkv[row, heads : heads + kv_heads], values[row]), strict=True
                ):
                    np.testing.assert_allclose(stored, given, rtol=1e-3, atol=1e-3)
                expected[row] = self.oracle(qkv[row, :heads], sequence, position)
            at += count
        return out, expected

    def _rows(self, sequence: Hashable, start: int, end: int) -> tuple[np.ndarray, ...]:
        """Rows of a sequence: K and V ``[H, n, D]``, queries ``[H, n, group, D]``."""
        k, v, queries = (
            np.stack(x).swapaxes(0, 1) for x in zip(*self.rows[sequence][start:end], strict=True)
        )
        return k, v, queries

    def _sealed(self, sequence: Hashable, start: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V of the page that begins at a position, as its codes say."""
        if (sequence, start) not in self.sealed:
            layout = self.layout
            keys, values, queries = self._rows(sequence, start, start + layout.page_size)
            widths = None
            if layout.k_bits is not None:
                widths = kv_codec.key_widths(keys, queries[:, -1], layout)
            unit = kv_codec.unpack_unit(kv_codec.seal_unit(keys, values, layout, widths), layout)
            self.sealed[sequence, start] = unit["k"], unit["v"]
        return self.sealed[sequence, start]

    def oracle(self, q: np.ndarray, sequence: Hashable, position: int) -> np.ndarray:
        """Attention of one row in numpy, over what the cache holds."""
        layout, page = self.layout, self.layout.page_size
        sealed = position // page * page
        pages = [self._sealed(sequence, start) for start in range(0, sealed, page)]
        k, v = [k for k, _ in pages], [v for _, v in pages]
        keys, values, _ = self._rows(sequence, sealed, position + 1)
        k.append(keys.astype(np.float32))
        v.append(values.astype(np.float32))
        group = self.num_heads // layout.num_kv_heads
        k, v = (np.repeat(np.concatenate(x, axis=1), group, axis=0) for x in (k, v))
        scores = np.einsum("hd,htd->ht", q, k) * layout.head_dim**-0.5
        variant = self.variant
        if variant.softcap is not None:
            scores = variant.softcap * np.tanh(scores / variant.softcap)
        if variant.window is not None:
            scores[:, : max(0, position + 1 - variant.window)] = -np.inf
        if variant.sinks:
            scores = np.concatenate([scores, self.sinks[:, None]], axis=1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out = np.einsum("ht,htd->hd", weights[:, : v.shape[1]], v)
        return out @ kv_codec.hadamard(layout.head_dim) if layout.v_bits is not None else out


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest error relative to the largest expected magnitude."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def random_rows(n: int, k: int, storage: str) -> PackedRows:
    """Rows of a weight with all codes, as ``storage`` keeps them."""
    kind, rng = STORAGES[storage], np.random.default_rng(n + k)
    codes = rng.integers(0, 2**kind.bits, (n, k), dtype=np.uint8)
    codes[0, :2] = 0, 2**kind.bits - 1
    groups = (n, k // kind.group)
    scale = (rng.uniform(0.5, 2, groups) * rng.choice([-1, 1], groups) / 2**kind.bits).astype(np.float16)
    offset = None
    if kind.offset is not None:
        zero, minimum = rng.integers(0, 17, groups), rng.standard_normal(groups)
        offset = (zero if kind.offset == "zero" else minimum).astype(np.float16)
    return PackedRows(storage, codes, scale, offset)


def in_operand_order(x: np.ndarray) -> np.ndarray:
    """Rows as the CUDA kernels for many rows read them."""
    places = np.arange(x.shape[1]).reshape(-1, 4, 8, 2).transpose(0, 2, 1, 3).ravel()
    return np.ascontiguousarray(x[:, places])


def gated(x: np.ndarray, activation: str) -> np.ndarray:
    """``act`` of the first half of rows, times the second half."""
    value, up = np.split(x.astype(np.float64), 2, axis=1)
    if activation == "silu":
        return value / (1 + np.exp(-value)) * up
    return 0.5 * value * (1 + np.tanh(np.sqrt(2 / np.pi) * (value + 0.044715 * value**3))) * up
