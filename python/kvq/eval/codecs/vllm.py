"""vLLM's rotated formats: ``int4_per_token_head`` and the TurboQuant presets.

``int4_per_token_head`` flips signs, rotates, and quantizes a token and head asymmetrically; its scale is a
float32 whose lowest bits hold the integer zero point. A 3-bit codec follows the same rule.

TurboQuant (arXiv 2504.19874) stores the norm of a rotated vector in fp16 and its direction by a Lloyd-Max
codebook for Gaussian coordinates. The ``turboquant`` codecs do so for K and V. vLLM's presets do so for K
alone, renormalized (``nc``), and quantize V per token without rotation. vLLM leaves the first two and the
last two layers of a model unquantized; here every layer is quantized, and no bits of such layers are counted.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import numpy as np

from kvq.eval.codecs.base import Recode, TensorCodec, asymmetric, fp16, rotated, safe


def _zero_point_in_scale(bits: int) -> Recode:
    top = 2**bits - 1

    def through(x: np.ndarray) -> np.ndarray:
        low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
        scale = np.maximum((high - low) / np.float32(top), np.float32(1e-6))
        zero = np.clip(np.floor(-low / scale + np.float32(0.5)), 0, top)
        codes = np.clip(np.floor(x / scale + zero + np.float32(0.5)), 0, top)
        kept = (scale.view(np.uint32) & ~np.uint32(top)).view(np.float32)
        return (codes - zero) * kept

    return through


@cache
def gaussian_codebook(bits: int) -> tuple[float, ...]:
    """Centroids that minimize the squared error of a standard normal variable, ascending (Lloyd 1957)."""

    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def below(x: float) -> float:
        return (1 + math.erf(x / math.sqrt(2))) / 2

    count = 2**bits
    centroids = [4.0 * (i + 0.5) / count - 2.0 for i in range(count)]
    for _ in range(2000):
        middles = [(a + b) / 2 for a, b in pairwise(centroids)]
        edges = [-math.inf, *middles, math.inf]
        centroids = [(density(a) - density(b)) / (below(b) - below(a)) for a, b in pairwise(edges)]
    return tuple(centroids)


def _codebook(bits: int, renormalize: bool) -> Recode:
    centroids = np.array(gaussian_codebook(bits), np.float32)
    edges = (centroids[1:] + centroids[:-1]) / 2

    def through(x: np.ndarray) -> np.ndarray:
        norm = np.sqrt(np.square(x).sum(axis=-1, keepdims=True))
        unit = x / safe(norm) * np.float32(math.sqrt(x.shape[-1]))
        found = centroids[np.searchsorted(edges, unit)]
        size = (
            np.sqrt(np.square(found).sum(axis=-1, keepdims=True)) if renormalize else math.sqrt(x.shape[-1])
        )
        return found / size * fp16(norm)

    return through


def _int(bits: int) -> TensorCodec:
    recode = rotated(_zero_point_in_scale(bits), signs=True)
    text = f"{bits}-bit asymmetric per token and head after signs and Hadamard, zero point in an fp32 scale"
    return TensorCodec(f"vllm-int{bits}", text, recode, recode, lambda head_dim: bits + 32 / head_dim)


def _turboquant(bits: int) -> TensorCodec:
    recode = rotated(_codebook(bits, renormalize=False), signs=True)
    text = f"{bits}-bit Lloyd-Max codebook after signs and Hadamard, fp16 norm"
    return TensorCodec(f"turboquant-{bits}bit", text, recode, recode, lambda head_dim: bits + 16 / head_dim)


def _preset(bits: int) -> TensorCodec:
    return TensorCodec(
        f"vllm-turboquant_{bits}bit_nc",
        f"K {bits}-bit Lloyd-Max codebook after Hadamard, fp16 norm; V {bits}-bit asymmetric per token",
        rotated(_codebook(bits, renormalize=True)),
        asymmetric(bits),
        lambda head_dim: bits + (16 + 32) / 2 / head_dim,
    )


CODECS = (_int(4), _int(3), _turboquant(4), _turboquant(3), _preset(4), _preset(3))
