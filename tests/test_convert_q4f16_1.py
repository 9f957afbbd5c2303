"""q4f16_1: its bits on disk, its error, and groups at the ends of the range."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.errors import ConfigError
from kvq.quantization.weights import dequantize_q4f16_1, quantize_q4f16_1


def test_bits_of_q4f16_1() -> None:
    weight = np.arange(-7, 9, dtype=np.float32).repeat(2)[None] * 0.5
    codes, scale = quantize_q4f16_1(weight)
    assert codes.dtype == np.uint32 and codes.shape == (1, 4)
    assert scale.dtype == np.float16 and scale.tolist() == [[0.5]]
    assert codes[0].tolist() == [0x33221100, 0x77665544, 0xBBAA9988, 0xFFEEDDCC]
    np.testing.assert_array_equal(dequantize_q4f16_1(codes, scale), weight)
    # The mirror image has the same codes: the scale takes the sign.
    mirrored = quantize_q4f16_1(-weight)
    np.testing.assert_array_equal(mirrored[0], codes)
    assert mirrored[1].tolist() == [[-0.5]]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.floats(-12, 3), st.sampled_from([np.float32, np.float16]))
def test_error_of_q4f16_1(seed: int, exponent: float, dtype: type) -> None:
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((3, 96)) * 2.0**exponent * rng.choice([0.1, 1, 10], (3, 96))).astype(dtype)
    codes, scale = quantize_q4f16_1(weight)
    assert np.isfinite(scale).all() and (scale != 0).all()
    step = np.abs(scale.astype(np.float32)).repeat(32, axis=1)
    error = np.abs(dequantize_q4f16_1(codes, scale) - weight)
    inside = np.abs(weight) <= 7 * step
    assert (error[inside] <= 0.501 * step[inside]).all()
    # Never worse than MLC-LLM's own choice, codes 0 .. 14 and max|w| / 7, but for the rounding of the scale.
    groups = weight.astype(np.float32).reshape(3, 3, 32)
    plain = (np.abs(groups).max(axis=2, keepdims=True) / 7).astype(np.float16).astype(np.float32)
    theirs = np.square(np.rint(groups / np.where(plain, plain, 1)) * plain - groups).sum()
    assert np.square(error).sum() <= 1.3 * theirs


def test_error_of_q4f16_1_on_common_weights() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 2048)).astype(np.float32)
    error = np.square(dequantize_q4f16_1(*quantize_q4f16_1(weight)) - weight).mean()
    groups = weight.reshape(-1, 32)
    plain = np.abs(groups).max(axis=1, keepdims=True) / 7
    assert error < 0.78 * np.square(np.rint(groups / plain) * plain - groups).mean()


def test_degenerate_groups_of_q4f16_1() -> None:
    weight = np.zeros((4, 32), np.float32)
    weight[1] = 3.7
    weight[2, 5] = 1e-12
    weight[3] = 524000.0  # near eight times the largest fp16
    codes, scale = quantize_q4f16_1(weight)
    assert np.isfinite(scale).all() and (scale != 0).all()
    back = dequantize_q4f16_1(codes, scale)
    assert (back[0] == 0).all()
    np.testing.assert_allclose(back[1], 3.7, rtol=1e-3)
    assert np.abs(back[2]).max() < 1e-6
    np.testing.assert_allclose(back[3], 524000.0, rtol=1e-3)
    with pytest.raises(ConfigError, match="beyond the fp16 range"):
        quantize_q4f16_1(weight * 2)
