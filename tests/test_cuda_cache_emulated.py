"""The CUDA kernels of a cache on the CPU: steps of prefill against the oracle, within their arrays."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import tvm

from cuda_emulator import build, compiler, run
from kernel_rig import CacheKernels, CacheRig, relative_error
from kvq.compiler.target import cuda_target
from kvq.layout import KVLayout
from kvq.quantization import kv_codec
from kvq.schedules.attention_variant import PLAIN, AttentionVariant

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


class Emulated:
    """A kernel's source as a function of tensors, blocks in random order."""

    def __init__(self, func, names: list[str], blocks, shared_bytes: int = 0) -> None:
        target = cuda_target("sm_90")
        func = func.with_attr("global_symbol", "main")
        module = tvm.IRModule({"main": func})
        source = (
            tvm.compile(module, target=target.target, tir_pipeline=target.tir_pipeline)
            .mod.imports[0]
            .inspect_source("cuda")
        )
        found = re.search(r"__launch_bounds__\((\d+)", source)
        assert found is not None
        self._directory = TemporaryDirectory(prefix="kvq-emulated-")  # as long as the kernel
        self.program = build(source, Path(self._directory.name), shared_bytes, int(found[1]))
        self.names, self.blocks = names, blocks

    def __call__(self, *values) -> None:
        given = dict(zip(self.names, values, strict=True))
        arrays = {f"{name}_ptr": v for name, v in given.items() if not isinstance(v, int)}
        sizes = {"num_open": len(given["kv_open"]), "layer": given["layer"]}
        for name in ("tasks", "q", "carries"):
            if name in given:
                sizes["n" if name == "q" else "num_tasks"] = len(given[name])
        grid = [(x, y) for x in range(self.blocks[0]) for y in range(self.blocks[1](given))]
        order = np.random.default_rng(0).permutation(len(grid))
        after = run(self.program, {**arrays, **sizes}, [grid[i] for i in order])
        for name, value in given.items():
            if f"{name}_ptr" in after and not isinstance(value, int):
                value[...] = after[f"{name}_ptr"]


def length(name: str):
    return lambda given: len(given[name])


def seal_kernel(layout: KVLayout, heads: int) -> Emulated:
    from kvq.schedules.cuda.kv_seal import kv_seal

    names = ["q", "kv_open", "kv_workspace", "counts", "tasks", "layer", "pool"]
    return Emulated(kv_seal(layout, heads), names, (layout.num_kv_heads, length("tasks")))


@cache
def kernels(layout: KVLayout, heads: int, variant: AttentionVariant):
    from kvq.schedules.cuda import kv_append, kv_carry, prefill_attention
    from kvq.schedules.cuda.prefill_warp import Place

    total = -(-(heads + 2 * layout.num_kv_heads) // kv_append.WARPS)
    kv_heads = layout.num_kv_heads
    append = kv_append.kv_append(layout, heads, layout.head_dim, layout.head_dim**-0.5, "float32")
    attend = prefill_attention.prefill_attention(layout, heads, "float32", variant)
    sinks = ["sinks"] if variant.sinks else []
    return (
        Emulated(
            append,
            ["qkv", "rope", "slots", "layer", "kv_open", "kv_workspace", "faults", "q"],
            (total, length("q")),
        ),
        seal_kernel(layout, heads),
        Emulated(
            attend,
            [
                *("q", "pool", "kv_workspace", "positions", "table", "counts", "tasks", "merges"),
                *(*sinks, "layer", "kv_open", "scratch", "out"),
            ],
            (kv_heads, length("tasks")),
            Place(layout).shared_bytes,
        ),
        Emulated(
            kv_carry.kv_carry(layout),
            ["kv_workspace", "counts", "tasks", "layer", "kv_open"],
            (kv_heads, length("tasks")),
        ),
    )


class EmulatedRig(CacheRig):
    """The rig's steps through the emulator."""

    def build_kernels(self, backend: None) -> CacheKernels:
        from kvq.schedules.cuda.prefill_attention import attention_shape

        shape = attention_shape(self.layout, self.num_heads)
        made = kernels(self.layout, self.num_heads, self.variant)
        return CacheKernels(*made, 4, shape.tile_rows, shape.scratch_extra)


def layout_of(k_bits, v_bits, dim=64, page=64, heads=1) -> KVLayout:
    return KVLayout(2, heads, dim, k_bits, v_bits, page, order="fragments")


#: Layout, query heads of each KV head, and what layers may have.
CASES = [
    (layout_of(4, 4, heads=2), 3, PLAIN),
    (layout_of(3, 2, 128, 32), 16, AttentionVariant(window=40, softcap=4.0)),
    (layout_of(None, None), 2, AttentionVariant(window=64, sinks=True)),
]


@pytest.mark.parametrize(
    ("layout", "group", "variant"), CASES, ids=[variant.suffix or "plain" for *_, variant in CASES]
)
def test_steps_equal_the_oracle(layout, group, variant):
    rig = EmulatedRig(
        layout, group, layer=1, threads=2, slots=0, num_pages=12, num_open=2, variant=variant, query_gain=2.0
    )
    page = layout.page_size
    for requests in ([("a", page + 9), ("b", 5)], [("b", page - 5), ("a", 1)], [("a", 2 * page), ("b", 3)]):
        out, expected = rig.append(requests)
        assert relative_error(out, expected) <= 3e-3


def test_a_row_has_the_same_bits_in_every_tile():
    """Rows of one page in one task, in several, and beside another sequence's."""
    layout, group, _ = CASES[0]
    outputs = []
    for chunks in ([139], [70, 63, 6]):
        rig = EmulatedRig(layout, group, threads=1, slots=0, num_pages=12, num_open=2, seed=3, query_gain=4.0)
        qkv = rig.random_rows(139)
        rig.cache.add_sequence("a")
        starts = np.cumsum([0, *chunks])
        pairs = zip(starts, chunks, strict=False)
        outputs.append(np.concatenate([rig.step([("a", n)], qkv[at : at + n]) for at, n in pairs]))
    np.testing.assert_array_equal(outputs[0], outputs[1])


def test_a_cache_of_one_layer_is_sealed():
    """``num_open`` times a unit is both the size of the open pages and what a workspace page lies behind."""
    layout = KVLayout(1, 1, 64, None, None, 32, order="fragments")
    rows = np.random.default_rng(5).standard_normal((3, 2, 32, 64)).astype(np.float16)
    pool = np.zeros(layout.pool_shape(2), np.uint32)
    seal_kernel(layout, 1)(
        np.zeros((1, 1, 64), np.float32),
        rows[:2].reshape(layout.open_shape(2)),
        rows[2:].reshape(layout.workspace_shape(1)),
        np.array([2, 0, 0, 0], np.int32),
        np.array([[1, 1, 0], [2, 0, 0]], np.int32),
        0,
        pool,
    )
    np.testing.assert_array_equal(pool[::-1, 0, 0], kv_codec.seal_unit(rows[1:, 0], rows[1:, 1], layout))
