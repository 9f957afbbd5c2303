"""What a codec is, and the arithmetic that several formats share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvq.quantization.kv_codec import hadamard

#: From a tensor to what a cache gives back of it: float32 ``[..., page, head_dim]`` both.
Recode = Callable[[np.ndarray], np.ndarray]


class Codec(Protocol):
    """A cache format as a reference: what it stores in bits, and what it gives back."""

    @property
    def name(self) -> str:
        """Name of the format, after ``peer:`` on the command line."""

    @property
    def description(self) -> str:
        """The format in a line."""

    @property
    def per_token(self) -> bool:
        """Whether what is kept of a token depends on that token alone: it can be coded when written."""

    def bits_per_value(self, head_dim: int) -> float:
        """Bits stored per cached value, scales and padding included; the mean of K and V."""

    def round_trip(self, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What attention reads of the keys (after RoPE) and values of full pages.

        All are float32 ``[..., page, head_dim]``.
        """


@dataclass(frozen=True)
class TensorCodec:
    """A format made of one function for K and one for V; satisfies :class:`Codec`.

    Attributes
    ----------
    name, description : str
    recode_k, recode_v : callable
        Round trips of a tensor.
    bits : callable
        Bits per value at a head_dim.
    per_token : bool
        Whether what is kept of a token depends on that token alone.
    """

    name: str
    description: str
    recode_k: Recode
    recode_v: Recode
    bits: Callable[[int], float]
    per_token: bool = True

    def bits_per_value(self, head_dim: int) -> float:
        """Bits stored per cached value, scales and padding included; the mean of K and V."""
        return self.bits(head_dim)

    def round_trip(self, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What attention reads of the keys and values of full pages, float32 ``[..., page, head_dim]``."""
        return self.recode_k(k), self.recode_v(v)


def fp16(x: np.ndarray) -> np.ndarray:
    """float32 values as float16 stores them."""
    return x.astype(np.float16).astype(np.float32)


def safe(scale: np.ndarray) -> np.ndarray:
    """A scale by which one may divide: 1 where it is zero, which is where every value is the same."""
    return np.where(scale == 0, np.float32(1), scale)


def rotated(recode: Recode, signs: bool = False) -> Recode:
    """``recode`` in the basis of an orthonormal Hadamard matrix over head_dim, after sign flips if asked for.

    The flips are fixed, drawn once: a format has the same ones for every token.
    """

    def through(x: np.ndarray) -> np.ndarray:
        dim = x.shape[-1]
        matrix = hadamard(dim)
        if signs:
            matrix = np.random.RandomState(dim).choice([-1.0, 1.0], (dim, 1)).astype(np.float32) * matrix
        return recode(x @ matrix) @ matrix.T

    return through


def in_groups(recode: Recode, size: int) -> Recode:
    """``recode`` on groups of ``size`` consecutive channels of a token; the last one is padded with zeros."""

    def through(x: np.ndarray) -> np.ndarray:
        dim = x.shape[-1]
        padding = -dim % size
        padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
        groups = padded.reshape(*x.shape[:-1], -1, size)
        return recode(groups).reshape(padded.shape)[..., :dim]

    return through


def along_tokens(recode: Recode, size: int) -> Recode:
    """``recode`` on groups of ``size`` consecutive tokens of a channel; a page holds whole groups."""

    def through(x: np.ndarray) -> np.ndarray:
        return np.swapaxes(in_groups(recode, size)(np.swapaxes(x, -1, -2)), -1, -2)

    return through


def asymmetric(bits: int) -> Recode:
    """Scale and minimum over the last axis, both kept in fp16; codes are rounded before the scales are."""

    def through(x: np.ndarray) -> np.ndarray:
        low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
        scale = (high - low) / np.float32(2**bits - 1)
        codes = np.clip(np.rint((x - low) / safe(scale)), 0, 2**bits - 1)
        return codes * fp16(scale) + fp16(low)

    return through
