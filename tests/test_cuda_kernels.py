"""The CUDA kernels against numpy, on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from cuda_rig import CudaCacheRig, gpu, kernel, stored_weight, tensor
from kernel_rig import gated, relative_error
from kvq.layout import KVLayout
from kvq.quantization import kv_codec
from kvq.runtime.sampler import Sampler, SamplingParams
from kvq.schedules.attention_variant import PLAIN, AttentionVariant

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpu() is None, reason="no CUDA device")]


def layout_of(k_bits, v_bits, dim=64, page=64, heads=3, row_dtype="float16") -> KVLayout:
    return KVLayout(2, heads, dim, k_bits, v_bits, page, row_dtype, "fragments")


SEALS = [
    *(layout_of(k, v) for k, v in ((8, 8), (4, 4), (3, 3), (2, 2), (4, None), (None, 3), (None, None))),
    *(layout_of(4, 3, dim, page) for dim, page in ((80, 64), (128, 32), (256, 64), (96, 128))),
    layout_of(None, None, row_dtype="float32"),
]
#: Layout and query heads of each KV head.
ATTENTION = [
    *((layout_of(k, v, heads=2), 3) for k, v in ((4, 4), (3, 3), (4, None), (None, None))),
    (layout_of(None, None, heads=2, row_dtype="float32"), 3),
    (layout_of(4, 4, 128, heads=1), 16),
    (layout_of(4, 4, 80, heads=2), 1),
    (layout_of(4, 3, 256, heads=1), 4),
    (layout_of(3, 4, 128, 32, heads=2), 4),
    (layout_of(4, 4, 96, 128, heads=2), 2),
]
LINEAR = [
    (97, 576, "int4"),
    (97, 576, "int4_min"),
    (64, 96, "int8_g16"),
    (97, 576, "int8_min"),
    (64, 1536, "int4"),
    (70, 192, "float16"),
    (97, 72, "float32"),
]
ROTARY = [0, 32, 64]

APPEND_LAYOUT = layout_of(None, None, heads=1)
#: Logits of a row, and ids that may be drawn.
DRAW = (128256, 128011)
#: Everything that the tests build: the backend's method and its arguments.
NEEDED = [
    *(("kv_seal", layout, 2 * layout.num_kv_heads) for layout in SEALS),
    *(("linear", *arguments) for arguments in LINEAR),
    *(("embedding", *arguments) for arguments in LINEAR),
    *(("kv_append", APPEND_LAYOUT, 2, rotary, 1.0, "float32") for rotary in ROTARY),
    ("rope_table", 32, 1.5),
    ("rms_norm", 576, 1e-5),
    ("gate", 1536, "silu"),
    ("gate", 1536, "gelu_tanh"),
    ("find_tokens", *DRAW),
]
#: The same with a window and soft-capping, over float32 rows.
VARIANT = (layout_of(None, None, heads=2, row_dtype="float32"), 3, AttentionVariant(70, 4.0))
RIGS = [
    (layout, group * layout.num_kv_heads, variant)
    for layout, group, variant in (*((*case, PLAIN) for case in ATTENTION), VARIANT)
]
for _layout, _heads, _variant in RIGS:
    NEEDED += [
        ("kv_append", _layout, _heads, _layout.head_dim, _layout.head_dim**-0.5, "float32"),
        ("kv_seal", _layout, _heads),
        ("paged_attention", _layout, _heads, "float32", _variant),
        ("kv_carry", _layout),
    ]


def make_rows(layout: KVLayout, rng: np.random.Generator) -> np.ndarray:
    """K with offsets, outliers, constants and zeros of both signs, V plain: ``[2, P, D]``."""
    page, dim = layout.page_size, layout.head_dim
    k = rng.standard_normal((page, dim)) + rng.standard_normal(dim) * 20
    k[:, 3] *= 100
    k[:, 5] = 7.25
    k[:, 9] = 0
    k[::2, 10] = -0.0
    k[1::2, 10] = 0.0
    v = rng.standard_normal((page, dim))
    v[3], v[4] = 0, -0.0
    return np.stack([k, v])


@pytest.mark.parametrize("layout", SEALS, ids=str)
def test_seal_is_bit_exact(layout):
    rng = np.random.default_rng(layout.head_dim)
    heads, dtype = layout.num_kv_heads, layout.row_dtype
    opened = np.stack([[[make_rows(layout, rng) for _ in range(heads)] for _ in range(2)] for _ in range(3)])
    workspace = np.stack([[make_rows(layout, rng) for _ in range(heads)] for _ in range(2)])
    opened, workspace = opened.astype(dtype), workspace.astype(dtype)
    pool = tensor(np.full(layout.pool_shape(5), 0xABABABAB, np.uint32))
    tasks = np.array([[1, 3, 5], [4, 0, 2], [0, 1, 0]], np.int32)
    q = rng.standard_normal((6, 2 * heads, layout.head_dim)).astype(np.float32)
    q *= np.exp(rng.standard_normal(layout.head_dim))
    kernel("kv_seal", layout, 2 * heads)(
        tensor(q),
        tensor(opened.reshape(layout.open_shape(3))),
        tensor(workspace.reshape(layout.workspace_shape(2))),
        tensor(np.array([2, 0, 0, 0], np.int32)),
        tensor(tasks),
        1,
        pool,
    )
    found = pool.numpy()
    for page_id, rows, last in ((3, opened[1, 1], 5), (0, workspace[1], 2)):
        widths = None
        if layout.k_bits is not None:
            widths = kv_codec.key_widths(rows[:, 0], q[last].reshape(heads, 2, -1), layout)
        expected = kv_codec.seal_unit(rows[:, 0], rows[:, 1], layout, widths)
        np.testing.assert_array_equal(found[page_id, 1], expected)
    untouched = np.delete(found.reshape(10, -1), [7, 1], axis=0)
    assert (untouched == 0xABABABAB).all()


@pytest.mark.parametrize(
    ("layout", "group", "variant"), [*((*case, PLAIN) for case in ATTENTION), VARIANT], ids=str
)
def test_attention_of_a_ragged_batch(layout, group, variant):
    """A long prompt in chunks, a short one beside it, decode of both; stale pages hold NaN."""
    rig = CudaCacheRig(layout, group, layer=1, variant=variant)
    for requests in (
        [("a", 2 * layout.page_size + 22)],
        [("a", 70), ("b", 40)],
        [("b", 1), ("a", 130)],
        *[[("a", 1), ("b", 1)]] * 3,
    ):
        out, expected = rig.append(requests)
        # tensor cores round queries, weights and rows to halves
        assert relative_error(out, expected) < (1e-5 if layout.row_dtype == "float32" else 3e-3)


def test_rows_have_the_same_bits_in_every_chunk():
    qkv = CudaCacheRig(ATTENTION[0][0], 3).random_rows(300)
    outputs = []
    for chunks in ([300], [1] * 20 + [100, 3, 177], [63, 1, 64, 172]):
        rig = CudaCacheRig(ATTENTION[0][0], 3)
        rig.cache.add_sequence("a")
        starts = np.cumsum([0, *chunks])
        pairs = zip(starts, chunks, strict=False)
        outputs.append(np.concatenate([rig.step([("a", n)], qkv[at : at + n]) for at, n in pairs]))
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])


def test_nan_and_infinity_are_replaced_and_counted():
    rig = CudaCacheRig(ATTENTION[0][0], 3)
    qkv = rig.random_rows(70)
    qkv[3, 6, 10] = np.nan  # a key
    qkv[6, 8, :] = np.nan  # a value
    qkv[65, 6, 1] = 1e6
    rig.cache.add_sequence("a")
    assert np.isfinite(rig.step([("a", 70)], qkv)).all()
    assert rig.faults[:, 0].nonzero()[0].tolist() == [3, 6]
    assert rig.faults[6, 0] == 64 and rig.faults[65].tolist() == [0, 1]


@pytest.mark.parametrize("rotary", ROTARY)
def test_rope_of_part_of_a_head(rotary):
    layout, n = APPEND_LAYOUT, 6
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((n, 4, 64)).astype(np.float32)
    angle = rng.standard_normal((n, max(rotary, 2) // 2)).astype(np.float32)
    rope = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    opened, workspace = (
        tensor(np.zeros(shape, np.float16)) for shape in (layout.open_shape(1), layout.workspace_shape(1))
    )
    q, faults = tensor(np.zeros((n, 2, 64), np.float32)), tensor(np.zeros((n, 2), np.int32))
    kernel("kv_append", layout, 2, rotary, 1.0, "float32")(
        tensor(qkv), tensor(rope), tensor(np.arange(n, dtype=np.int32)), 0, opened, workspace, faults, q
    )
    expected, half = qkv.copy(), rotary // 2
    cos, sin = (x[:, None, :half] for x in (np.cos(angle), np.sin(angle)))
    a, b = qkv[..., :half], qkv[..., half:rotary]
    expected[..., :half], expected[..., half:rotary] = a * cos - b * sin, b * cos + a * sin
    np.testing.assert_allclose(q.numpy(), expected[:, :2], atol=1e-6)
    rows = opened.numpy()[0, 0, 0].reshape(2, 64, 64)[:, :n]
    np.testing.assert_allclose(rows[0], expected[:, 2], atol=2e-3)
    np.testing.assert_array_equal(rows[1], qkv[:, 3].astype(np.float16))


def test_rope_table_is_accurate_far_from_the_start():
    positions = np.array([0, 1, 77, 8191, 131071], np.int32)
    frequency = (10000.0 ** -(np.arange(32) / 32)).astype(np.float32)
    out = tensor(np.full((5, 64), np.nan, np.float32))
    kernel("rope_table", 32, 1.5)(tensor(positions), tensor(frequency), out)
    angle = (positions[:, None].astype(np.float32) * frequency).astype(np.float64)
    expected = 1.5 * np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    np.testing.assert_allclose(out.numpy(), expected, atol=3e-7)


@pytest.mark.parametrize(("n_out", "k", "kind"), LINEAR)
def test_linear(n_out, k, kind):
    rng = np.random.default_rng(k)
    stored, weight = stored_weight(n_out, k, kind, rng)
    x = rng.standard_normal((21, k)).astype(np.float32)
    product = kernel("linear", n_out, k, kind)
    found = {}
    for n in (1, 2, 8, 9, 21):
        out = tensor(np.full((n, n_out), np.nan, np.float32))
        product(tensor(x[:n]), *stored, out)
        found[n] = out.numpy()
    assert relative_error(found[21], x @ weight.T) < 3e-6
    for n, rows in found.items():
        np.testing.assert_array_equal(rows, found[21][:n])  # a row alone and in a tile: the same bits


@pytest.mark.parametrize(("n_out", "k", "kind"), LINEAR)
def test_embedding(n_out, k, kind):
    stored, weight = stored_weight(n_out, k, kind, np.random.default_rng(1))
    ids = np.array([0, n_out - 1, 5, 5, n_out + 3, -1], np.int32)  # ids outside are the nearest row
    out = tensor(np.full((6, k), np.nan, np.float32))
    kernel("embedding", n_out, k, kind)(tensor(ids), *stored, out)
    np.testing.assert_array_equal(out.numpy(), weight[np.clip(ids, 0, n_out - 1)])


def test_norm_and_gate():
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((5, 576)) * 30).astype(np.float32)
    weight = rng.standard_normal(576).astype(np.float32)
    out = tensor(np.full(x.shape, np.nan, np.float32))
    kernel("rms_norm", 576, 1e-5)(tensor(x), tensor(weight), out)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(out.numpy(), expected, rtol=2e-6)
    x = (rng.standard_normal((3, 3072)) * 20).astype(np.float32)
    x[0, :4] = -200, 200, 0, -90
    for activation, floor in (("silu", 1e-30), ("gelu_tanh", 1e-6)):
        out = tensor(np.full((3, 1536), np.nan, np.float32))
        kernel("gate", 1536, activation)(tensor(x), out)
        np.testing.assert_allclose(out.numpy(), gated(x, activation), rtol=1e-5, atol=floor)


def test_draws_are_the_hosts():
    """Where the C libraries' exponentials agree; they differ in the last digit here and there."""
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal((96, DRAW[0])) * 2.5).astype(np.float32)
    limits = (
        {},
        {"top_p": 0.95},
        {"top_k": 50},
        {"min_p": 0.02},
        {"top_p": 0.8, "top_k": 1000},
        {"top_p": 0.3},
    )
    samplers = [
        Sampler(SamplingParams(seed=row, temperature=0.5 + row / 96, **limits[row % 6]), (), DRAW[1], row)
        for row in range(96)
    ]
    fields = np.stack([sampler.device_draw(row) for row, sampler in enumerate(samplers)])
    out = tensor(np.full(96, -7, np.int32))
    kernel("find_tokens", *DRAW)(tensor(logits), tensor(fields), out)
    host = [sampler.sample(logits[row], row).id for row, sampler in enumerate(samplers)]
    assert np.count_nonzero(out.numpy() != host) <= 3
    again = tensor(np.full(96, -7, np.int32))
    kernel("find_tokens", *DRAW)(tensor(logits), tensor(fields), again)
    np.testing.assert_array_equal(out.numpy(), again.numpy())
    kernel("find_tokens", *DRAW)(tensor(logits), tensor(np.zeros_like(fields)), out)
    np.testing.assert_array_equal(out.numpy(), logits[:, : DRAW[1]].argmax(axis=1))
