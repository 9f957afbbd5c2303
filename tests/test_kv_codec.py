"""The reference codec of the KV formats: packing, exactness, and what must never clamp."""

import numpy as np
import pytest

from kvq.errors import ConfigError
from kvq.layout import KVLayout
from kvq.quantization import fragments, kv_codec, kv_words, lanes

BITS = (8, 4, 3, 2)


def make_layout(k_bits, v_bits, dim=64, page=64, order="lanes", mixed_keys=True):
    return KVLayout(1, 1, dim, k_bits, v_bits, page_size=page, order=order, mixed_keys=mixed_keys)


@pytest.mark.parametrize("bits", [*BITS, 5, 1])
def test_pack_round_trip_and_density(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (5, 7, 32))
    words = lanes.pack_codes(codes, bits)
    assert words.shape == (5, 7, bits) and words.dtype == np.uint32
    np.testing.assert_array_equal(lanes.unpack_codes(words, bits), codes)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("page", [64, 128])
def test_unit_round_trip(bits, dim, page):
    rng = np.random.default_rng(dim)
    layout = make_layout(bits, bits, dim, page)
    k = (rng.standard_normal((3, page, dim)) * 3 + rng.standard_normal(dim) * 20).astype(np.float16)
    v = rng.standard_normal((3, page, dim)).astype(np.float16)
    words = kv_codec.seal_unit(k, v, layout)
    assert words.shape == (3, layout.unit_words)
    out = kv_codec.unpack_unit(words, layout)
    # half a step, plus the rounding of the dequantized value itself
    assert np.all(np.abs(out["k"] - k) <= out["k_scale"][:, None] * 0.501 + 1e-3)
    step = np.abs(out["v_scale"].astype(np.float32))[..., None]
    error = np.abs(out["v"] - v)
    # the element opposite to the extreme one may sit a step beyond the last code
    assert np.all(error <= step * 1.02) and np.mean(error <= step * 0.501) > 0.95


@pytest.mark.parametrize("bits", [*BITS, 16])
@pytest.mark.parametrize(("page", "dim"), [(32, 64), (64, 64), (64, 80), (64, 128), (128, 112), (32, 256)])
def test_fragments_hold_the_registers_of_the_instruction(bits, page, dim):
    """Register r of lane 4 g + c of tile (T, t), as the PTX manual draws operand A."""
    codes = np.random.default_rng(bits).integers(0, 2**bits, (page, dim)).astype(np.uint16)
    per_lane = page * dim // 32
    vector = np.gcd(page * dim * bits // 1024, 4)
    for side in (fragments.KEY_ROWS, fragments.VALUES):
        words = fragments.pack(codes, bits, side)
        assert words.shape == (page * dim * bits // 32,)
        lanes = words.reshape(-1, 32, vector).swapaxes(0, 1).reshape(32, -1, bits)
        halves = np.stack([lanes & 0xFFFF, lanes >> 16], axis=-2).astype(np.uint16)
        found = np.moveaxis(fragments.unpack_halves(halves, bits), -2, -1).reshape(32, per_lane // 8, 4, 2)
        lane, tile, pair, half = np.meshgrid(*map(np.arange, found.shape), indexing="ij")
        g, c, big, small = lane // 4, lane % 4, tile // (dim // 16), tile % (dim // 16)
        keys = side is fragments.KEY_ROWS
        register = np.array([0, 2, 1, 3])[pair] if keys else pair  # pairs of equal parity share a factor
        row, column = g + 8 * (register % 2), 2 * c + half + 8 * (register // 2)  # of operand A
        token_in_tile, channel_in_tile = (row, column) if keys else (column, row)
        token = token_in_tile % 8 * (page // 8) + 2 * big + token_in_tile // 8
        if keys:  # four channels of a lane are neighbours, so that it reads its queries and scales at once
            channel = c * (dim // 4) + 4 * small + half + 2 * (column // 8)
        else:
            channel = channel_in_tile % 8 * (dim // 8) + 2 * small + channel_in_tile // 8
        np.testing.assert_array_equal(found, codes[token, channel])
        layout = make_layout(None, None, dim, page, "fragments")
        np.testing.assert_array_equal(fragments.unpack(words, layout, bits, side), codes)


@pytest.mark.parametrize(("page", "dim"), [(64, 64), (64, 128), (32, 128), (128, 256)])
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_a_tile_of_key_codes_has_one_width(bits, page, dim):
    """Register (x, y) of lane 4 g + c of tile (T, t): pair 8 t + 4 y + c of the pairs as they are stored."""
    layout = make_layout(bits, 4, dim, page, "fragments")
    wide, narrow = layout.k_classes[0][1], layout.k_classes[-1][1]
    assert len(layout.k_classes) == 3 and wide == narrow == dim // 4
    rng = np.random.default_rng(bits)
    k, v = rng.standard_normal((2, page, dim)).astype(np.float16)
    widths = kv_codec.key_widths(k, rng.standard_normal((1, dim)).astype(np.float32), layout)
    words = kv_codec.seal_unit(k, v, layout, widths)
    codes = kv_codec.unpack_unit(words, layout)["k_codes"]
    count = page * dim * bits // 1024
    lanes = words[: 32 * count].reshape(-1, 32, np.gcd(count, 4)).swapaxes(0, 1).reshape(32, count)
    order, at = kv_words.key_order(widths).reshape(-1, 2), 0
    for first in range(0, page // 16, layout.k_block_tokens // 16):
        for width, steps in ((bits + 1, wide // 16), (bits, (dim - 2 * wide) // 16), (bits - 1, wide // 16)):
            start = {bits + 1: 0, bits: wide // 16, bits - 1: (dim - wide) // 16}[width]
            tiles = [
                (row, t)
                for row in range(first, first + layout.k_block_tokens // 16)
                for t in range(start, start + steps)
            ]
            chunks = lanes[:, at : at + len(tiles) * width // 4].reshape(32, -1, width)
            at += len(tiles) * width // 4
            halves = np.stack([chunks & 0xFFFF, chunks >> 16], axis=-2).astype(np.uint16)
            found = np.moveaxis(fragments.unpack_halves(halves, width), -2, -1).reshape(32, len(tiles), 4, 2)
            lane, tile, pair, half = np.meshgrid(*map(np.arange, found.shape), indexing="ij")
            row, t = np.array(tiles).T[:, tile]
            token = lane // 4 * (page // 8) + 2 * row + pair // 2
            np.testing.assert_array_equal(found, codes[token, order[8 * t + 4 * (pair % 2) + lane % 4, half]])
    assert at == count


@pytest.mark.parametrize("mixed", [False, True], ids=["even", "mixed"])
@pytest.mark.parametrize(
    ("k_bits", "v_bits"), [(4, 4), (3, 3), (8, 8), (4, 2), (4, None), (None, 3), (None, None)]
)
@pytest.mark.parametrize(("page", "dim"), [(32, 64), (64, 80), (64, 128), (128, 96)])
def test_fragments_change_the_order_alone(k_bits, v_bits, page, dim, mixed):
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 3, page, dim)).astype(np.float16)
    plain, order = (make_layout(k_bits, v_bits, dim, page, order, mixed) for order in ("lanes", "fragments"))
    if plain.k_classes != order.k_classes:
        pytest.skip("tiles cut the channels more coarsely than lanes")
    words = kv_codec.seal_unit(k, v, order)
    assert words.shape == (3, order.unit_words)
    offsets = (
        order.k_scale_offset,
        order.k_min_offset,
        order.v_offset,
        order.v_scale_offset,
        order.k_header_offset,
    )
    assert all(offset % 4 == 0 for offset in (*offsets, order.unit_words))
    expected = kv_codec.unpack_unit(kv_codec.seal_unit(k, v, plain), plain)
    found = kv_codec.unpack_unit(words, order)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("order", ["lanes", "fragments"])
def test_float32_rows_round_trip(order):
    layout = KVLayout(1, 1, 64, None, None, row_dtype="float32", order=order)
    k, v = np.random.default_rng(4).standard_normal((2, 2, 64, 64)).astype(np.float32)
    out = kv_codec.unpack_unit(kv_codec.seal_unit(k, v, layout), layout)
    np.testing.assert_array_equal(out["k"], k)
    np.testing.assert_array_equal(out["v"], v)


@pytest.mark.parametrize(("k_bits", "v_bits"), [(None, None), (4, None), (None, 3), (4, 2), (3, 2)])
def test_mixes_round_trip(k_bits, v_bits):
    rng = np.random.default_rng(1)
    layout = make_layout(k_bits, v_bits, 128)
    k, v = rng.standard_normal((2, 4, 64, 128)).astype(np.float16)
    out = kv_codec.unpack_unit(kv_codec.seal_unit(k, v, layout), layout)
    if k_bits is None:
        np.testing.assert_array_equal(out["k"], k)
    else:
        assert np.abs(out["k"] - k).max() < 8 / 2**k_bits
    if v_bits is None:
        np.testing.assert_array_equal(out["v"], v)


def test_bits_per_value_at_head_dim_128():
    assert make_layout(4, 4, 128).bits_per_value == 4.25
    assert make_layout(3, 3, 128).bits_per_value == 3.25
    assert make_layout(3, 2, 128).bits_per_value == 2.75
    assert make_layout(None, None, 128).bits_per_value == 16


@pytest.mark.parametrize("page", [32, 64, 128])
@pytest.mark.parametrize("dim", [64, 80, 112, 128, 256])
@pytest.mark.parametrize(("k_bits", "v_bits"), [(4, 4), (3, 2), (2, None)])
def test_mixed_widths_cost_no_bits_and_come_back(page, dim, k_bits, v_bits):
    if dim * page % 512:
        pytest.skip("no such layout")
    mixed, even = (make_layout(k_bits, v_bits, dim, page, mixed_keys=flag) for flag in (True, False))
    rng = np.random.default_rng(dim)
    k = (rng.standard_normal((2, page, dim)) * np.exp(rng.standard_normal(dim))).astype(np.float16)
    v = rng.standard_normal((2, page, dim)).astype(np.float16)
    queries = (rng.standard_normal((2, 3, dim)) * np.exp(2 * rng.standard_normal(dim))).astype(np.float32)
    widths = kv_codec.key_widths(k, queries, mixed)
    counts = {bits: channels for bits, channels in mixed.k_classes}
    for row in widths:
        assert {bits: int((row == bits).sum()) for bits in counts} == counts
        np.testing.assert_array_equal(row[: dim // 2], row[dim // 2 :])
    words = kv_codec.seal_unit(k, v, mixed, widths)
    out = kv_codec.unpack_unit(words, mixed)
    np.testing.assert_array_equal(out["k_widths"], widths)
    assert np.all(out["k_codes"] < 2 ** widths[:, None])
    assert np.all(np.abs(out["k"] - k) <= out["k_scale"][:, None] * 0.501 + 1e-3)
    assert mixed.k_code_words == even.k_code_words
    if v_bits and 8 + dim <= 5 * page:
        assert mixed.unit_words == even.unit_words
        step = np.abs(out["v_scale"].astype(np.float32))[..., None]
        assert np.all(np.abs(out["v"] - v) <= step * 1.05)
    else:
        assert mixed.unit_words - even.unit_words <= dim // 32 + 1


def test_mixed_widths_follow_what_the_scores_feel():
    """The error of scores falls by a third and more where channels differ, at the same number of bits."""
    mixed, even = (make_layout(3, 3, 128, mixed_keys=flag) for flag in (True, False))
    rng = np.random.default_rng(8)
    spread, size = np.exp(0.7 * rng.standard_normal((2, 128)))
    k = (rng.standard_normal((40, 64, 128)) * spread + 20 * rng.standard_normal(128)).astype(np.float16)
    queries = (rng.standard_normal((40, 7, 128)) * size).astype(np.float32)
    errors = []
    for layout, widths in (
        (even, None),
        (mixed, kv_codec.key_widths(k, None, mixed)),
        (mixed, kv_codec.key_widths(k, queries[:, :3], mixed)),
    ):
        found = kv_codec.unpack_unit(kv_codec.seal_unit(k, k, layout, widths), layout)["k"]
        errors.append(np.square((found - k) @ queries[:, 3:].swapaxes(1, 2)).mean())
    assert errors[2] < 0.66 * errors[0] and errors[2] < 0.95 * errors[1]


def test_constant_channels_and_zero_rows_are_exact():
    rng = np.random.default_rng(2)
    k = np.broadcast_to(rng.standard_normal(64) * 50, (64, 64)).astype(np.float16)
    v = np.zeros((64, 64), np.float16)
    v[::2] = rng.standard_normal((32, 64))
    for bits in BITS:
        out = kv_codec.unpack_unit(kv_codec.seal_unit(k, v, make_layout(bits, bits)), make_layout(bits, bits))
        np.testing.assert_array_equal(out["k"], k)
        np.testing.assert_array_equal(out["v"][1::2], 0)
        for scale in (out["k_scale"], out["v_scale"]):
            assert np.isfinite(scale).all() and (scale != 0).all()


@pytest.mark.parametrize("bits", [4, 3])
def test_offsets_and_outliers_keep_their_channel(bits):
    """An offset of 100 times the range, and channels of 100 times the median, cost no other channel."""
    rng = np.random.default_rng(3)
    k = rng.standard_normal((64, 64)).astype(np.float32)
    k[:, 5] += 300
    k[:, 6] *= 100
    k = k.astype(np.float16)
    layout = make_layout(bits, bits)
    out = kv_codec.unpack_unit(kv_codec.seal_unit(k, k * 0, layout), layout)
    span = (k.max(0) - k.min(0)).astype(np.float32)
    relative = np.abs(out["k"] - k).max(0) / span
    assert np.all(relative <= 0.5 * (1 + 1 / 16) / (2.0 ** out["k_widths"] - 1) + 1e-4)


def test_extreme_magnitudes():
    layout = make_layout(4, 4)
    k = np.full((64, 64), 65504, np.float16)
    k[::2] = -65504
    k[:, :32] = np.float16(6e-8) * (np.arange(64)[:, None] % 3)
    words = kv_codec.seal_unit(k, k, layout)
    out = kv_codec.unpack_unit(words, layout)
    assert all(np.isfinite(out[name]).all() for name in ("k", "v", "k_scale", "v_scale"))
    assert np.abs(out["k"] - k).max() <= 65504 * 2 / 15


def test_sanitize():
    x = np.array([np.nan, np.inf, -np.inf, 1e6, -7.0], np.float32)
    np.testing.assert_array_equal(kv_codec.sanitize(x), np.array([0, 65504, -65504, 65504, -7], np.float16))


@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256])
def test_hadamard_is_its_own_inverse(dim):
    h = kv_codec.hadamard(dim)
    np.testing.assert_allclose(h @ h, np.eye(dim), atol=1e-6)
    np.testing.assert_array_equal(h, h.T)


def test_unsupported_geometry_is_refused():
    with pytest.raises(ConfigError, match="head_dim 100"):
        make_layout(4, 4, 100)
    with pytest.raises(ConfigError, match="page size 48"):
        make_layout(4, 4, 64, 48)
    with pytest.raises(ConfigError, match="64 or 128"):
        make_layout(3, 3, 72, 32)
    with pytest.raises(ConfigError, match="multiple of 16"):
        make_layout(4, 4, 72, order="fragments")
    with pytest.raises(ConfigError, match="64 or 128"):
        make_layout(4, 4, 80, 32, order="fragments")
    with pytest.raises(ConfigError, match="order 'rows'"):
        make_layout(4, 4, order="rows")
