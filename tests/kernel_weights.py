"""Random weights for tests of products: as a checkpoint stores them, prepared by a backend's own kernels."""

from __future__ import annotations

import numpy as np

from kernel_backends import KernelBackend
from kernel_rig import random_rows
from kvq.passes.lower_weights import WeightPlan
from kvq.quantization.storage import STORAGES, pack_codes


class Weight:
    """A random weight ``[n, k]``: ``tensors`` that kernels take, and ``value``, what they stand for."""

    def __init__(self, n: int, k: int, storage: str, backend: KernelBackend) -> None:
        kind = STORAGES[storage]
        if kind.bits is None:
            values = np.random.default_rng(n + k).standard_normal((n, k)).astype(storage)
            stored, self.value = {"w.weight": values}, values.astype(np.float32)
        else:
            rows = random_rows(n, k, storage)
            self.value = rows.dequantized()
            stored = {"w.q_weight": pack_codes(rows.codes, kind.bits), "w.q_scale": rows.scale}
            if rows.offset is not None:
                stored[f"w.q_{kind.offset}"] = rows.offset
        plan = WeightPlan(backend.kernels)
        plan.add("w.weight", (n, k), storage)
        self.tensors = []
        for prepared in plan.tensors:
            raw = stored.pop(prepared.source)
            if prepared.function is None:
                self.tensors.append(raw)
                continue
            self.tensors.append(np.full(prepared.shape, 77, prepared.dtype))
            backend.build(plan.prepare[prepared.function][0])(raw, self.tensors[-1])
        assert not stored
