"""The cache's kernels of every backend against the numpy reference, through the runtime's own step plans."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kernel_backends import BACKENDS, CPU, KernelBackend, cache_kernels, kernel, present
from kernel_rig import CacheRig, relative_error
from kvq.layout import KVLayout
from kvq.quantization import kv_codec
from kvq.schedules.attention_variant import PLAIN, AttentionVariant


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    return present(request.param)


def layout_of(k_bits, v_bits, dim=64, heads=1, page=32, **options) -> KVLayout:
    return KVLayout(2, heads, dim, k_bits, v_bits, page, **options)


#: Layout, query heads of each KV head, what layers may have. Every width of keys and of values, every kind
#: of layer, page sizes, ratios and head_dims from end to end are here at least once.
CASES = [
    (layout_of(4, 4, heads=2, page=64), 3, PLAIN),
    (layout_of(None, 8, 256), 1, AttentionVariant(window=64)),
    (layout_of(3, 2, 128), 8, PLAIN),
    (layout_of(2, None, 96), 4, AttentionVariant(softcap=4.0, sinks=True)),
    (layout_of(8, 3, 80, page=128), 2, AttentionVariant(window=33, softcap=4.0)),
    (layout_of(None, None, row_dtype="float32"), 16, AttentionVariant(window=31, sinks=True)),
]
#: Pairs of widths, other head_dims and ratios, for the backend that is compiled and run in the least time.
CPU_CASES = [
    (layout_of(None, None, 192, heads=2), 5, PLAIN),
    (layout_of(3, 3, 112), 6, PLAIN),
    (layout_of(2, 2, 72, page=64), 2, PLAIN),
    (layout_of(8, 8, 256), 1, PLAIN),
]


def cases_of(backend: KernelBackend) -> list[tuple[KVLayout, int, AttentionVariant]]:
    return [*CASES, *CPU_CASES] if backend is CPU else CASES


def case_name(value: object) -> str:
    if isinstance(value, KVLayout):
        return f"k{value.k_bits}-v{value.v_bits}-d{value.head_dim}-p{value.page_size}"
    if isinstance(value, AttentionVariant):
        return value.suffix.strip("_") or "plain"
    return getattr(value, "name", str(value))


#: On each backend, each of its cases.
EVERYWHERE = pytest.mark.parametrize(
    ("backend", "layout", "group", "variant"),
    [(backend, *case) for backend in BACKENDS for case in cases_of(backend)],
    ids=case_name,
    indirect=["backend"],
)
#: Error relative to the largest magnitude: sums in fp32, in one order or another.
TOLERANCE = 1e-5


@EVERYWHERE
def test_steps_equal_the_oracle(backend, layout, group, variant):
    """A ragged batch: a long prompt in chunks, a short one beside it, decode of both."""
    rig = CacheRig(
        layout, group, backend=backend, layer=1, num_pages=12, num_open=2, variant=variant, query_gain=2.0
    )
    page = layout.page_size
    for requests in (
        [("a", 2 * page + 9)],
        [("a", page), ("b", page - 2)],
        [("b", 1), ("a", 1)],
    ):
        out, expected = rig.append(requests)
        assert relative_error(out, expected) < TOLERANCE


@pytest.mark.parametrize("case", [0, 3], ids=["rotated values", "sinks"])
def test_split_rows_equal_the_oracle(backend, case):
    """The keys of a row of decode are cut among tasks, whose results are merged."""
    layout, group, variant = CASES[case]
    rig = CacheRig(layout, group, backend=backend, layer=1, num_pages=12, num_open=2, variant=variant)
    splits = []
    for requests in ([("a", 8 * layout.page_size + 40)], [("b", 5), ("a", 1)]):
        out, expected = rig.append(requests)
        assert relative_error(out, expected) < TOLERANCE
        splits.append(rig.plan.merge_tasks[: rig.plan.plan_counts[3], 2].tolist())
    assert splits == [[], [3]]


#: Cases whose kernels of decode run on a GPU; they take long to compile, so each backend has its own.
DECODED = {"wgsl": (0,), "msl": (3,), "vulkan": (2, 4)}


@pytest.mark.parametrize(
    ("backend", "case"),
    [(backend, case) for backend in BACKENDS for case in DECODED.get(backend.name, ())],
    ids=case_name,
    indirect=["backend"],
)
def test_decode_equals_the_oracle(backend, case):
    """Steps of a row a sequence: a long one that is split, and one of no sealed page.

    First into tasks of one split, then as for a GPU that is too small for all of them: in two of two.
    """
    layout, group, variant = CASES[case]
    heads = group * layout.num_kv_heads
    decode = kernel(backend, "paged_attention_decode", layout, heads, "float32", variant)
    rig = CacheRig(
        layout, group, backend=backend, layer=1, num_pages=20, num_open=2, variant=variant, decode=decode
    )
    rig.append([("a", 7 * layout.page_size), ("b", 5)])
    rig.append([("a", 6 * layout.page_size + 9)])
    parts = []
    for on_gpu, requests in itertools.product((False, True), ([("b", 1), ("a", 1)], [("a", 1)])):
        if on_gpu:
            rig.plan.on_gpu, rig.threads = True, layout.num_kv_heads
        out, expected = rig.append(requests)
        assert relative_error(out, expected) < TOLERANCE
        parts += rig.plan.merge_tasks[: rig.plan.plan_counts[3], 2].tolist()
    assert variant.window is not None or parts == [4, 4, 2, 4]


def make_rows(layout: KVLayout, rng: np.random.Generator) -> np.ndarray:
    """K with offsets and outlier channels, V plain, as one row page: [H, 2, P * D]."""
    heads, page, dim = layout.num_kv_heads, layout.page_size, layout.head_dim
    k = rng.standard_normal((heads, page, dim)) + rng.standard_normal(dim) * 20
    k[..., 3] *= 100
    k[..., 5] = 7.25
    k[0, :, 9] = 0
    v = rng.standard_normal((heads, page, dim))
    v[0, 3] = 0
    return np.stack([k.swapaxes(1, 2).reshape(heads, -1), v.reshape(heads, -1)], axis=1)


@EVERYWHERE
def test_sealed_pages_have_the_words_of_the_reference(backend, layout, group, variant):
    rng, heads = np.random.default_rng(layout.head_dim), layout.num_kv_heads
    page, dim = layout.page_size, layout.head_dim
    kv_open = np.stack([[make_rows(layout, rng) for _ in range(2)] for _ in range(3)]).astype(
        layout.row_dtype
    )
    workspace = np.stack([make_rows(layout, rng) for _ in range(2)]).astype(layout.row_dtype)
    pool = np.full(layout.pool_shape(5), 0xABABABAB, np.uint32)
    tasks = np.array([[1, 3, 5], [4, 0, 2], [0, 1, 0]], np.int32)
    q = rng.standard_normal((6, heads, group, dim)) * np.exp(rng.standard_normal(dim))
    q[2, 0, 0, 7], q[2, 0, -1, 9], q[2, 0, 0, 3] = np.nan, np.inf, 1e25  # what is no number has no weight
    q = q.astype(np.float32)
    seal = cache_kernels(backend, layout, heads * group, variant).seal
    counts = np.array([2, 0, 0, 0], np.int32)
    seal(q.reshape(6, heads * group, dim), kv_open, workspace, counts, tasks, 1, pool)
    for page_id, rows, last in ((3, kv_open[1, 1], 5), (0, workspace[1], 2)):
        k = rows[:, 0].reshape(heads, dim, page).swapaxes(1, 2)
        v = rows[:, 1].reshape(heads, page, dim)
        widths = kv_codec.key_widths(k, q[last], layout) if layout.k_bits else None
        np.testing.assert_array_equal(pool[page_id, 1], kv_codec.seal_unit(k, v, layout, widths))
    untouched = np.delete(pool.reshape(10, -1), [7, 1], axis=0)
    assert (untouched == 0xABABABAB).all()


def test_nan_and_infinity_are_replaced_and_counted(backend):
    layout, group, _ = CASES[0]
    rig = CacheRig(layout, group, backend=backend, layer=1, num_pages=12, num_open=2)
    qkv, heads = rig.random_rows(70), rig.num_heads
    qkv[3, heads, 10] = np.nan  # a key
    qkv[5, heads + 1, 11] = -np.inf
    qkv[6, heads + 2, :] = np.nan  # a value
    qkv[65, heads, 1] = 1e6
    rig.cache.add_sequence("a")
    out = rig.step([("a", 70)], qkv)
    assert np.isfinite(out).all()
    assert rig.faults[:, 0].nonzero()[0].tolist() == [3, 5, 6]  # rotating by infinity makes NaN of its pair
    assert rig.faults[65].tolist() == [0, 1]
    assert rig.faults[6, 0] == 64
    page = rig.cache.sequence("a").pages[0]
    unit = kv_codec.unpack_unit(rig.pool[page, 1], rig.layout)
    assert all(np.isfinite(x).all() for x in unit.values())
    assert (unit["k_scale"] > 0).all() and (unit["v_scale"] != 0).all()
    np.testing.assert_array_equal(unit["v"][0, 6], 0)


def test_repeated_token_over_pages_is_exact(backend):
    """Equal keys make every channel constant: its range is zero, and the cache must hold it exactly."""
    layout, group, _ = CASES[0]
    rig = CacheRig(layout, group, backend=backend, layer=1, num_pages=12, num_open=2)
    qkv = np.repeat(rig.random_rows(1), 136, axis=0)
    qkv[:, rig.num_heads, :8] += 100  # an offset of a hundred times the range
    out, expected = rig.append([("a", 136)], qkv)
    assert relative_error(out, expected) < TOLERANCE
    key = rig.rows["a"][0][0][0]
    pages = list(rig.cache.sequence("a").pages)
    unit = kv_codec.unpack_unit(rig.pool[pages, 1, 0], rig.layout)
    np.testing.assert_array_equal(unit["k"], np.broadcast_to(key.astype(np.float32), (2, 64, 64)))


@pytest.mark.parametrize("rotary", [0, 32, 64])
def test_rope_of_part_of_a_head(backend, rotary):
    """The halves of the rotary part form pairs; the rest of the head passes."""
    layout, n = layout_of(None, None, page=64), 6
    append = kernel(backend, "kv_append", layout, 2, rotary, 1.0, "float32")
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((n, 4, 64)).astype(np.float32)
    angle = rng.standard_normal((n, max(rotary, 2) // 2)).astype(np.float32)
    rope = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    kv_open = np.zeros(layout.open_shape(1), np.float16)
    workspace = np.zeros(layout.workspace_shape(1), np.float16)
    q, faults = np.zeros((n, 2, 64), np.float32), np.zeros((n, 2), np.int32)
    append(qkv, rope, np.arange(n, dtype=np.int32), 0, kv_open, workspace, faults, q)
    expected = qkv.copy()
    half = rotary // 2
    cos, sin = (x[:, None, :half] for x in (np.cos(angle), np.sin(angle)))
    a, b = qkv[..., :half], qkv[..., half:rotary]
    expected[..., :half], expected[..., half:rotary] = a * cos - b * sin, b * cos + a * sin
    np.testing.assert_allclose(q, expected[:, :2], atol=1e-6)
    k = kv_open[0, 0, 0, 0].reshape(64, 64).T[:n]
    np.testing.assert_allclose(k, expected[:, 2], atol=2e-3)
    v = kv_open[0, 0, 0, 1].reshape(64, 64)[:n]
    np.testing.assert_array_equal(v, qkv[:, 3].astype(np.float16))


def test_rope_table_is_accurate_far_from_the_start(backend):
    positions = np.array([0, 1, 77, 8191, 131071], np.int32)
    frequency = (10000.0 ** -(np.arange(32) / 32)).astype(np.float32)
    out = np.full((5, 64), np.nan, np.float32)
    kernel(backend, "rope_table", 32, 1.5)(positions, frequency, out)
    angle = (positions[:, None].astype(np.float32) * frequency).astype(np.float64)
    expected = 1.5 * np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    np.testing.assert_allclose(out, expected, atol=5e-7)
