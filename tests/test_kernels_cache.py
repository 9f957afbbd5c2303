"""The cache's kernels against the numpy reference, through the runtime's own step plans."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_rig import CacheRig, build, relative_error, tensor
from kvq.compiler.target import cpu_target
from kvq.layout import KVLayout
from kvq.quantization import kv_codec
from kvq.schedules.cpu.kv_append import kv_append
from kvq.schedules.cpu.kv_seal import kv_seal

SCHEMES = [(None, None), (8, 8), (4, 4), (3, 3), (2, 2), (4, 3), (3, 2), (4, None), (None, 4)]
DIMS = [64, 80, 96, 112, 128, 192, 256]


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


SEALS = [(*scheme, 64, 64) for scheme in SCHEMES] + [
    (k_bits, v_bits, dim, page)
    for k_bits, v_bits in ((4, 4), (3, 2))
    for dim, page in ((80, 64), (128, 64), (256, 64), (96, 128), (64, 32))
]


@pytest.mark.parametrize(("k_bits", "v_bits", "dim", "page"), SEALS)
def test_seal_is_bit_exact(k_bits, v_bits, dim, page):
    layout = KVLayout(2, 3, dim, k_bits, v_bits, page)
    rng = np.random.default_rng(dim)
    kv_open = np.stack([[make_rows(layout, rng) for _ in range(2)] for _ in range(3)]).astype(np.float16)
    workspace = np.stack([make_rows(layout, rng) for _ in range(2)]).astype(np.float16)
    pool = tensor(np.full(layout.pool_shape(5), 0xABABABAB, np.uint32))
    tasks = np.array([[1, 3, 5], [4, 0, 2], [0, 1, 0]], np.int32)
    group, kernel = 2, build(kv_seal(layout, 6, cpu_target().isa))
    q = (rng.standard_normal((6, 3, group, dim)) * np.exp(rng.standard_normal(dim))).astype(np.float32)
    q[2, 1, 0, 7], q[2, 2, 1, 9], q[2, 0, 1, 3] = np.nan, np.inf, 1e25  # what is no number has no weight
    counts = np.array([2, 0, 0, 0], np.int32)
    queries = tensor(q.reshape(6, 3 * group, dim))
    kernel(queries, tensor(kv_open), tensor(workspace), tensor(counts), tensor(tasks), 1, pool)
    found = pool.numpy()
    for page_id, rows, last in ((3, kv_open[1, 1], 5), (0, workspace[1], 2)):
        k = rows[:, 0].reshape(3, dim, page).swapaxes(1, 2)
        v = rows[:, 1].reshape(3, page, dim)
        widths = kv_codec.key_widths(k, q[last], layout) if k_bits else None
        np.testing.assert_array_equal(found[page_id, 1], kv_codec.seal_unit(k, v, layout, widths))
    untouched = np.delete(found.reshape(10, -1), [7, 1], axis=0)
    assert (untouched == 0xABABABAB).all()


@pytest.mark.parametrize(("k_bits", "v_bits"), SCHEMES)
def test_attention_of_every_scheme(k_bits, v_bits):
    """A ragged batch: a long prompt in chunks, a short one beside it, decode of both."""
    rig = CacheRig(KVLayout(2, 2, 64, k_bits, v_bits), 3, layer=1)
    for requests in (
        [("a", 150)],
        [("a", 70), ("b", 40)],
        [("b", 1), ("a", 130)],
        *[[("a", 1), ("b", 1)]] * 3,
    ):
        out, expected = rig.append(requests)
        assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("group", [1, 2, 4, 6, 8, 16])
def test_attention_of_every_gqa_ratio(group):
    rig = CacheRig(KVLayout(1, 2, 64, 4, 4), group)
    for requests in ([("a", 200)], [("a", 1)], [("a", 100), ("b", 3)]):
        out, expected = rig.append(requests)
        assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize(("dim", "k_bits", "v_bits"), [(d, 4, 4) for d in DIMS] + [(80, 3, 3), (256, 3, 3)])
def test_attention_of_every_head_dim(dim, k_bits, v_bits):
    rig = CacheRig(KVLayout(1, 1, dim, k_bits, v_bits), 2)
    for requests in ([("a", 140)], [("a", 1)]):
        out, expected = rig.append(requests)
        assert relative_error(out, expected) < 1e-5


def test_attention_of_unquantized_float32_rows():
    rig = CacheRig(KVLayout(1, 2, 64, None, None, row_dtype="float32"), 3)
    for requests in ([("a", 140)], [("a", 1)]):
        out, expected = rig.append(requests)
        assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("page", [32, 128])
def test_other_page_sizes(page):
    rig = CacheRig(KVLayout(1, 2, 64, 4, 4, page), 2)
    for requests in ([("a", 300)], [("a", 1)]):
        out, expected = rig.append(requests)
        assert relative_error(out, expected) < 1e-5


def test_plain_kernels_for_any_cpu():
    rig = CacheRig(KVLayout(1, 2, 64, 4, 3), 2, opt="O0")
    for requests in ([("a", 140)], [("a", 1)]):
        out, expected = rig.append(requests)
        assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize(("k_bits", "v_bits"), [(None, None), (4, 4), (3, 2)])
def test_same_bits_for_any_chunking_batch_and_thread_count(k_bits, v_bits):
    """A row's output and the sealed words do not depend on the step it came in, or on its company."""
    length, layout = 700, KVLayout(1, 1, 64, k_bits, v_bits)
    qkv = CacheRig(layout, 2, seed=5).random_rows(length)
    results = []
    for chunks, company, threads in (
        ([length], 0, 1),
        ([1], 0, 8),
        ([7], 0, 2),
        ([64], 5, 2),
        ([500], 30, 4),
    ):
        rig = CacheRig(layout, 2, threads=threads)
        outputs, start, turn = [], 0, 0
        rig.cache.add_sequence("a")
        if company:
            rig.cache.add_sequence("b")
        while start < length and (chunks != [1] or start < 140 or length - start < 3):
            count = min(chunks[turn % len(chunks)], length - start)
            rows = qkv[start : start + count]
            requests = [("a", count)]
            if company and start + count < 600:
                requests = [("b", company), *requests]
                rows = np.concatenate([rig.random_rows(company), rows])
            outputs.append(rig.step(requests, rows)[-count:])
            start, turn = start + count, turn + 1
        pages = list(rig.cache.sequence("a").pages)
        results.append((np.concatenate(outputs), rig.pool.numpy()[pages]))
    whole, words = results[0]
    for output, sealed in results[1:]:
        np.testing.assert_array_equal(output, whole[: len(output)])
        np.testing.assert_array_equal(sealed, words[: len(sealed)])


def test_split_rows_have_the_bits_of_whole_ones():
    """Decode over many pages is cut into splits where there is room for their results."""
    qkv = CacheRig(KVLayout(1, 1, 64, 4, 4), 2, seed=6).random_rows(901)
    outputs = []
    for slots in (1, 64):
        rig = CacheRig(KVLayout(1, 1, 64, 4, 4), 2, slots=slots)
        rig.cache.add_sequence("a")
        rig.step([("a", 500)], qkv[:500])
        rig.step([("a", 400)], qkv[500:900])
        outputs.append(rig.step([("a", 1)], qkv[900:]))
        assert rig.plan.plan_counts[3] == (slots > 1)
    np.testing.assert_array_equal(outputs[0], outputs[1])


def test_nan_and_infinity_are_replaced_and_counted():
    rig = CacheRig(KVLayout(1, 2, 64, 4, 4), 2)
    qkv = rig.random_rows(70)
    qkv[3, 4, 10] = np.nan  # a key
    qkv[5, 5, 11] = -np.inf
    qkv[6, 6, :] = np.nan  # a value
    qkv[65, 4, 1] = 1e6
    rig.cache.add_sequence("a")
    out = rig.step([("a", 70)], qkv)
    assert np.isfinite(out).all()
    assert rig.faults[:, 0].nonzero()[0].tolist() == [3, 5, 6]  # rotating by infinity makes NaN of its pair
    assert rig.faults[65].tolist() == [0, 1]
    assert rig.faults[6, 0] == 64
    page = rig.cache.sequence("a").pages[0]
    unit = kv_codec.unpack_unit(rig.pool.numpy()[page, 0], rig.layout)
    assert all(np.isfinite(x).all() for x in unit.values())
    assert (unit["k_scale"] > 0).all() and (unit["v_scale"] != 0).all()
    np.testing.assert_array_equal(unit["v"][0, 6], 0)


def test_repeated_token_over_three_pages_is_exact():
    """Equal keys make every channel constant: its range is zero, and the cache must hold it exactly."""
    rig = CacheRig(KVLayout(1, 1, 64, 3, 3), 1)
    qkv = np.repeat(rig.random_rows(1), 200, axis=0)
    qkv[:, 1, :8] += 100  # an offset of a hundred times the range
    out, expected = rig.append([("a", 200)], qkv)
    assert relative_error(out, expected) < 1e-5
    key = rig.rows["a"][0][0][0]
    pages = list(rig.cache.sequence("a").pages)
    unit = kv_codec.unpack_unit(rig.pool.numpy()[pages, 0, 0], rig.layout)
    np.testing.assert_array_equal(unit["k"], np.broadcast_to(key.astype(np.float32), (3, 64, 64)))


@pytest.mark.parametrize("rotary", [0, 32, 64])
def test_rope_of_part_of_a_head(rotary):
    """The halves of the rotary part form pairs; the rest of the head passes."""
    layout, n = KVLayout(1, 1, 64, None, None), 6
    kernel = build(kv_append(layout, 2, rotary, 1.0, "float32", cpu_target().isa))
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((n, 4, 64)).astype(np.float32)
    angle = rng.standard_normal((n, max(rotary, 2) // 2)).astype(np.float32)
    rope = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    kv_open, workspace = (
        tensor(np.zeros(shape, np.float16)) for shape in (layout.open_shape(1), layout.workspace_shape(1))
    )
    q = tensor(np.zeros((n, 2, 64), np.float32))
    faults = tensor(np.zeros((n, 2), np.int32))
    kernel(tensor(qkv), tensor(rope), tensor(np.arange(n, dtype=np.int32)), 0, kv_open, workspace, faults, q)
    expected = qkv.copy()
    half = rotary // 2
    cos, sin = (x[:, None, :half] for x in (np.cos(angle), np.sin(angle)))
    a, b = qkv[..., :half], qkv[..., half:rotary]
    expected[..., :half], expected[..., half:rotary] = a * cos - b * sin, b * cos + a * sin
    np.testing.assert_allclose(q.numpy(), expected[:, :2], atol=1e-6)
    k = kv_open.numpy()[0, 0, 0, 0].reshape(64, 64).T[:n]
    np.testing.assert_allclose(k, expected[:, 2], atol=2e-3)
    v = kv_open.numpy()[0, 0, 0, 1].reshape(64, 64)[:n]
    np.testing.assert_array_equal(v, qkv[:, 3].astype(np.float16))
