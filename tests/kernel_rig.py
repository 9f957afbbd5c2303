"""Drives the cache's kernels step by step, beside a numpy oracle that holds every row."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import numpy as np
import tvm

from kvq.layout import KVLayout
from kvq.quantization import kv_codec
from kvq.quantization.storage import STORAGES, PackedRows
from kvq.runtime.kv_cache import PagedKVCache
from kvq.runtime.step_plan import StepPlan, build_step
from kvq.schedules.attention_variant import PLAIN, AttentionVariant


def build(func: Any, opt: str = "O2"):
    """Compile one kernel for this machine."""
    from kvq.compiler.target import cpu_target

    return tvm.compile(func.with_attr("global_symbol", "main"), target=cpu_target(opt).target)["main"]


def tensor(array: np.ndarray, device: Any = None) -> tvm.runtime.Tensor:
    return tvm.runtime.tensor(np.ascontiguousarray(array), device)


@cache
def cache_kernels(layout: KVLayout, num_heads: int, opt: str, variant: AttentionVariant):
    """``kv_append``, ``kv_seal``, ``paged_attention`` and ``kv_carry``, and how attention is cut."""
    from kvq.compiler.target import cpu_target

    kernels = cpu_target(opt).kernels
    scale = layout.head_dim**-0.5
    built = (
        build(kernels.kv_append(layout, num_heads, layout.head_dim, scale, "float32"), opt),
        build(kernels.kv_seal(layout, num_heads), opt),
        build(kernels.paged_attention(layout, num_heads, "float32", variant), opt),
        build(kernels.kv_carry(layout), opt),
    )
    shape = kernels.attention_shape(layout, num_heads)
    return built, (shape.split_pages, shape.tile_rows, shape.scratch_extra)


class CacheRig:
    """One layer of a model's cache, ``layer`` of ``layout.num_layers``; ``device`` is the CPU by default."""

    device: Any = None

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
        opt: str = "O2",
        seed: int = 0,
        variant: AttentionVariant = PLAIN,
        query_gain: float = 1.0,
    ) -> None:
        self.layout, self.layer, self.threads = layout, layer, threads
        self.variant, self.query_gain = variant, query_gain
        self.num_heads = group * layout.num_kv_heads
        self.kernels, (split_pages, tile_rows, extra) = self.build_kernels(opt)
        self.rng = np.random.default_rng(seed)
        self.sinks = self.rng.standard_normal(self.num_heads).astype(np.float32)
        num_workspace = 12
        # stale contents: NaN rows and random words must never be seen
        self.pool = self.tensor(self.rng.integers(0, 2**32, layout.pool_shape(num_pages), dtype=np.uint32))
        self.open = self.tensor(np.full(layout.open_shape(num_open), np.nan, layout.row_dtype))
        self.workspace = self.tensor(np.full(layout.workspace_shape(num_workspace), np.nan, layout.row_dtype))
        self.scratch = self.tensor(
            np.full((max(slots, 1), self.num_heads, layout.head_dim + extra), np.nan, np.float32)
        )
        self.cache = PagedKVCache(layout, num_pages, num_open, num_workspace, self._copy_open, variant.window)
        pages = [self.cache.pool.allocate() for _ in range(num_pages)]
        for page in self.rng.permutation(pages):  # what is given out next lies scattered
            self.cache.pool.release(int(page))
        self.plan = StepPlan(self.cache, 1024, num_pages * num_open, split_pages, slots, tile_rows)
        self.rows: dict[Hashable, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}

    def build_kernels(self, opt: str):
        return cache_kernels(self.layout, self.num_heads, opt, self.variant)

    def tensor(self, array: np.ndarray) -> tvm.runtime.Tensor:
        return tensor(array, self.device)

    def _copy_open(self, src: int, dst: int) -> None:
        rows = self.open.numpy()
        rows[dst] = rows[src]
        self.open.copyfrom(rows)

    def random_rows(self, n: int) -> np.ndarray:
        """qkv float32 ``[n, Hq + 2 H, D]``."""
        total = self.num_heads + 2 * self.layout.num_kv_heads
        rows = self.rng.standard_normal((n, total, self.layout.head_dim))
        rows[:, : self.num_heads] *= self.query_gain
        return rows.astype(np.float32)

    def step(self, requests: list[tuple[Hashable, int]], qkv: np.ndarray) -> np.ndarray:
        """Run a step and return its output, float32 ``[n, Hq, D]``."""
        layout, plan = self.layout, build_step(self.plan, requests, self.threads)
        n = plan.num_rows
        append, seal, attend, carry = self.kernels
        rope = np.concatenate(
            [np.ones((n, layout.head_dim // 2)), np.zeros((n, layout.head_dim // 2))], axis=1
        )
        q, out = self.tensor(np.full((n, self.num_heads, layout.head_dim), np.nan, np.float32)), None
        counts, faults = self.tensor(plan.plan_counts), self.tensor(plan.kv_faults)
        append(
            self.tensor(qkv), self.tensor(rope.astype(np.float32)), self.tensor(plan.append_slots[:n]),
            self.layer, self.open, self.workspace, faults, q,
        )  # fmt: skip
        self.faults = faults.numpy()[:n]
        self._record(requests, plan.append_slots[:n], q.numpy())
        seal(q, self.open, self.workspace, counts, self.tensor(plan.seal_tasks), self.layer, self.pool)
        out = self.tensor(np.full((n, self.num_heads, layout.head_dim), np.nan, np.float32))
        sinks = [self.tensor(self.sinks)] if self.variant.sinks else []
        attend(
            q, self.pool, self.workspace, self.tensor(plan.positions[:n]), self.tensor(plan.page_table),
            counts, self.tensor(plan.attention_tasks), self.tensor(plan.merge_tasks), *sinks, self.layer,
            self.open, self.scratch, out,
        )  # fmt: skip
        carry(self.workspace, counts, self.tensor(plan.carry_tasks), self.layer, self.open)
        plan.commit()
        return out.numpy()

    def _record(self, requests: list[tuple[Hashable, int]], slots: np.ndarray, q: np.ndarray) -> None:
        """Keep what ``kv_append`` made: rows of K, V (rotated if quantized) and Q, ``[H, (group,) D]``."""
        layout, rows = self.layout, []
        opened, workspace = self.open.numpy()[:, self.layer], self.workspace.numpy()
        for slot, queries in zip(slots, q, strict=True):
            page, offset = divmod(int(slot), layout.page_size)
            unit = opened[page] if page < len(opened) else workspace[page - len(opened)]
            if layout.order == "lanes":
                k = unit[:, 0].reshape(-1, layout.head_dim, layout.page_size)[:, :, offset]
            else:
                k = unit[:, 0].reshape(-1, layout.page_size, layout.head_dim)[:, offset]
            v = unit[:, 1].reshape(-1, layout.page_size, layout.head_dim)[:, offset]
            rows.append((k, v, queries.reshape(layout.num_kv_heads, -1, layout.head_dim)))
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

    def oracle(self, q: np.ndarray, sequence: Hashable, position: int) -> np.ndarray:
        """Attention of one row in numpy, over what the cache holds."""
        layout, page = self.layout, self.layout.page_size
        keys, values, queries = (
            np.stack(x).swapaxes(0, 1) for x in zip(*self.rows[sequence], strict=True)
        )  # [H, t, D], queries [H, t, group, D]
        sealed = position // page * page
        k, v = [], []
        for start in range(0, sealed, page):
            rows = slice(start, start + page)
            widths = None
            if layout.k_bits is not None:
                widths = kv_codec.key_widths(keys[:, rows], queries[:, start + page - 1], layout)
            words = kv_codec.seal_unit(keys[:, rows], values[:, rows], layout, widths)
            unit = kv_codec.unpack_unit(words, layout)
            k.append(unit["k"])
            v.append(unit["v"])
        own = slice(sealed, position + 1)
        k.append(keys[:, own].astype(np.float32))
        v.append(values[:, own].astype(np.float32))
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


def gated(x: np.ndarray, activation: str) -> np.ndarray:
    """``act`` of the first half of rows, times the second half."""
    value, up = np.split(x.astype(np.float64), 2, axis=1)
    if activation == "silu":
        return value / (1 + np.exp(-value)) * up
    return 0.5 * value * (1 + np.tanh(np.sqrt(2 / np.pi) * (value + 0.044715 * value**3))) * up
