"""Compare candidate cache formats on real keys and values, without running a model.

    kvq inspect smollm2 --quantization q0f16 --prompt "$(head -c 4000 book.txt)" --dump dump.npz
    python scripts/search_formats.py dump.npz --bits 4 3

A format is a grouping (which values share a scale), a rule for scale and offset, and a precision in which
these are stored: small functions, combined by ``candidates`` and tried on K and on V each by itself. Printed
are bits per value at head_dim 128, the error of the values (relative, squared), and the error of attention's
output (relative, root of the square) with the other of K and V exact. Queries are drawn from the covariance
of the keys and scaled until their scores spread by ``--spread``. This ranks formats; what they cost a model
is for ``kvq eval perplexity`` to say.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvq.quantization.kv_codec import hadamard

#: From values ``[..., n]`` that share a scale, and bits, to scale and offset ``[..., 1]``.
Rule = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]
#: From scale and offset to both as they are stored.
Precision = Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]


def encode(x: np.ndarray, scale: np.ndarray, offset: np.ndarray, bits: int) -> np.ndarray:
    """Codes of ``x``: the nearest of ``offset + scale * (0 .. 2**bits - 1)``."""
    return np.clip(np.rint((x - offset) / np.where(scale == 0, 1, scale)), 0, 2**bits - 1)


# ---- rules: how scale and offset follow from the values -------------------------------------------------
def absmax(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The element of largest magnitude sits on the most negative code; the scale has its sign."""
    extreme = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)
    scale = extreme / -(2.0 ** (bits - 1))
    return scale, -(2.0 ** (bits - 1)) * scale


def symmetric(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Zero is a code, as many codes above it as below; one code is never used."""
    scale = np.abs(x).max(-1, keepdims=True) / (2 ** (bits - 1) - 1)
    return scale, -(2.0 ** (bits - 1)) * scale


def mid_rise(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Zero lies between two codes; all codes are used."""
    scale = np.abs(x).max(-1, keepdims=True) / (2 ** (bits - 1) - 0.5)
    return scale, -(2 ** (bits - 1) - 0.5) * scale


def asymmetric(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Lowest value on the lowest code, highest on the highest."""
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    return (high - low) / (2**bits - 1), low


def clipped(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Of the asymmetric range and tighter ones around its middle, that of the least squared error."""
    scale, low = asymmetric(x, bits)
    middle = low + scale * (2**bits - 1) / 2
    best = np.full(scale.shape, np.inf)
    found = scale, low
    for share in (1.0, 0.95, 0.9, 0.85, 0.8, 0.7):
        tried = scale * share, middle + (low - middle) * share
        error = np.square(tried[1] + tried[0] * encode(x, *tried, bits) - x).sum(-1, keepdims=True)
        found = tuple(np.where(error < best, new, old) for new, old in zip(tried, found, strict=True))
        best = np.minimum(best, error)
    return found


def refitted(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The line of least squares through the codes that the asymmetric range gives."""
    scale, low = asymmetric(x, bits)
    codes = encode(x, scale, low, bits)
    centred = codes - codes.mean(-1, keepdims=True)
    spread = np.square(centred).sum(-1, keepdims=True)
    slope = (centred * x).sum(-1, keepdims=True) / np.where(spread == 0, 1, spread)
    slope = np.where(spread == 0, scale, slope)
    return slope, x.mean(-1, keepdims=True) - slope * codes.mean(-1, keepdims=True)


# ---- precisions: how scale and offset are stored ------------------------------------------------------
def single(scale: np.ndarray, offset: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Both as they are."""
    return scale, offset


def half(scale: np.ndarray, offset: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Both in fp16; an offset tied to the scale stays tied."""
    stored = scale.astype(np.float16).astype(np.float64)
    ratio = np.divide(offset, scale, out=np.zeros_like(offset), where=scale != 0)
    tied = np.ptp(ratio) < 1e-6
    return stored, ratio * stored if tied else offset.astype(np.float16).astype(np.float64)


def minifloat(scale: np.ndarray, offset: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The scale with 4 bits of mantissa, rounded up; the offset in fp16."""
    mantissa, exponent = np.frexp(scale)
    return np.ldexp(np.ceil(mantissa * 32) / 32, exponent), offset.astype(np.float16).astype(np.float64)


def zero_point(scale: np.ndarray, offset: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The scale with 4 bits of mantissa; the offset as an integer of 8 bits in units of the scale."""
    stored, _ = minifloat(scale, offset, bits)
    zero = np.clip(np.rint(-offset / np.where(stored == 0, 1, stored)), -128, 127)
    return stored, -zero * stored


# ---- groupings: which values share a scale ------------------------------------------------------------
def per_token(x: np.ndarray) -> np.ndarray:
    """``[page, head_dim]`` as it is: a group is a token."""
    return x


def per_channel(x: np.ndarray) -> np.ndarray:
    """A group is a channel of the page."""
    return np.swapaxes(x, -1, -2)


@dataclass(frozen=True)
class Format:
    """A format; ``page`` matters where groups run along tokens, ``block`` cuts groups of channels."""

    rule: Rule
    precision: Precision
    grouping: Callable[[np.ndarray], np.ndarray] = per_token
    page: int = 64
    block: int | None = None
    rotate: bool = False

    @property
    def name(self) -> str:
        """The choices, in a line."""
        where = f"per channel, page {self.page}" if self.grouping is per_channel else "per token"
        parts = [self.rule.__name__, self.precision.__name__, where]
        parts += [f"blocks of {self.block}"] * bool(self.block) + ["rotated"] * self.rotate
        return ", ".join(parts)

    def bits_per_value(self, bits: int, head_dim: int = 128) -> float:
        """Codes and what is kept for a group, per value."""
        group = self.page if self.grouping is per_channel else self.block or head_dim
        scale = {single: 32, half: 16, minifloat: 8, zero_point: 8}[self.precision]
        offset = {single: 32, half: 16, minifloat: 16, zero_point: 8}[self.precision]
        tied = self.rule in (absmax, symmetric, mid_rise)
        return bits + (scale + (0 if tied else offset)) / group

    def round_trip(self, x: np.ndarray, bits: int) -> np.ndarray:
        """``[..., token, head_dim]`` as the format gives it back; tokens are a multiple of the page."""
        matrix = hadamard(x.shape[-1]).astype(np.float64) if self.rotate else None
        rows = x if matrix is None else x @ matrix
        pages = rows.reshape(*x.shape[:-2], -1, self.page, x.shape[-1])
        groups = self.grouping(pages)
        cut = groups.reshape(*groups.shape[:-1], -1, self.block) if self.block else groups
        scale, offset = self.precision(*self.rule(cut, bits), bits)
        decoded = (offset + scale * encode(cut, scale, offset, bits)).reshape(groups.shape)
        back = self.grouping(decoded).reshape(x.shape)
        return back if matrix is None else back @ matrix


def candidates() -> list[Format]:
    """The formats to try."""
    token = [
        Format(rule, precision, rotate=rotate)
        for rule, precision, rotate in itertools.product(
            (absmax, symmetric, mid_rise, asymmetric, clipped, refitted), (half,), (False, True)
        )
    ]
    blocks = [Format(absmax, half, block=32, rotate=rotate) for rotate in (False, True)]
    channel = [
        Format(rule, precision, per_channel, page)
        for rule, precision, page in itertools.product(
            (asymmetric, clipped, refitted), (single, half, minifloat, zero_point), (32, 64, 128)
        )
        if precision is not single or page == 64
    ]
    return [*token, *blocks, *channel, Format(absmax, half, per_channel)]


# ---- measures ---------------------------------------------------------------------------------------
def squared_error(found: np.ndarray, exact: np.ndarray) -> float:
    """Squared error over squared size, the mean over layers and heads."""
    error, size = (np.square(a).sum((-1, -2)) for a in (found - exact, exact))
    return float((error / size).mean())


def draw_queries(k: np.ndarray, count: int, spread: float) -> np.ndarray:
    """Queries ``[..., count, head_dim]`` of the keys' covariance; scores of each spread by ``spread``."""
    rng = np.random.RandomState(0)
    mixed = rng.standard_normal((*k.shape[:-2], count, k.shape[-2])) / np.sqrt(k.shape[-2])
    queries = mixed @ (k - k.mean(-2, keepdims=True))
    scores = queries @ np.swapaxes(k, -1, -2)
    return queries * (spread / scores.std(-1, keepdims=True))


def attend(queries: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention's output ``[..., query, head_dim]``; the scale of the scores is in the queries."""
    scores = queries @ np.swapaxes(k, -1, -2)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def load(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """K and V of a dump, float64 ``[layer, head, token, head_dim]``, a multiple of 128 tokens."""
    with np.load(path) as dump:
        parts = [dump[name].astype(np.float64) for name in ("exact_k", "exact_v")]
    rows = [np.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, x.shape[-1]) for x in parts]
    tokens = rows[0].shape[-2] // 128 * 128
    if not tokens:
        raise SystemExit(f"{path}: holds fewer than 128 tokens: dump a longer prompt")
    return rows[0][..., :tokens, :], rows[1][..., :tokens, :]


def main() -> None:
    """Parse the command line, try every format, print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dump", type=Path, help="file that kvq inspect --dump wrote")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3], help="widths (default: 4 3)")
    parser.add_argument("--queries", type=int, default=32, help="queries a head (default: %(default)s)")
    parser.add_argument("--spread", type=float, default=2.0, help="of their scores (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    k, v = load(args.dump)
    queries = draw_queries(k, args.queries, args.spread)
    exact = attend(queries, k, v)
    rows = []
    for bits, form in itertools.product(args.bits, candidates()):
        new_k, new_v = (form.round_trip(x, bits) for x in (k, v))
        rows.append(
            {
                "bits": bits,
                "format": form.name,
                "bits_per_value_d128": form.bits_per_value(bits),
                "k_error": squared_error(new_k, k),
                "v_error": squared_error(new_v, v),
                "attention_error_of_k": squared_error(attend(queries, new_k, v), exact) ** 0.5,
                "attention_error_of_v": squared_error(attend(queries, k, new_v), exact) ** 0.5,
            }
        )
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{k.shape[0]} layers, {k.shape[1]} heads, {k.shape[2]} tokens, head_dim {k.shape[3]}")
    print(f"{'bits':>8}{'K error':>10}{'V error':>10}{'out (K)':>10}{'out (V)':>10}  format")
    for row in sorted(rows, key=lambda row: (-row["bits"], row["attention_error_of_k"])):
        values = (
            row[name] for name in ("k_error", "v_error", "attention_error_of_k", "attention_error_of_v")
        )
        print(f"{row['bits_per_value_d128']:8.3f}" + "".join(f"{x:10.5f}" for x in values), "", row["format"])


if __name__ == "__main__":
    main()
