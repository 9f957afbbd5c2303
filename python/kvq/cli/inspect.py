"""``kvq inspect``: codes, scales, dequantized values and errors of a quantized cache."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from kvq.inspect_cache import Inspection

NAME = "inspect"

_EXAMPLE = """example:
  kvq inspect smollm2 --prompt "Once upon a time" --kv int3
  kvq inspect ./out --prompt "Once upon a time" --layer 3 --head 1 --dump cache.npz
"""
#: Channels or tokens, and codes of each, that the detail shows; --dump has all of them.
_SHOWN, _CODES = 8, 12


def add_parser(subparsers: Any) -> None:
    """Add the command to ``kvq``."""
    parser = subparsers.add_parser(
        NAME,
        help="codes, scales and errors of a quantized cache, against the unquantized one",
        description="Runs a prompt with a quantized and an unquantized cache and compares the sealed pages.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="smollm2, a .gguf file, a checkpoint, or a converted directory")
    add("--prompt", metavar="TEXT", required=True, help="continued greedily if it fills no page")
    add("--kv", "--kv-quantization", metavar="K", default="int4", help="cache scheme (default: %(default)s)")
    add("--layer", metavar="L", type=int, help="show a page of this layer in detail")
    add("--head", metavar="H", type=int, help="and of this KV head")
    add("--page", metavar="N", type=int, default=0, help="which sealed page (default: the first)")
    add("--quantization", metavar="Q", help="weight scheme (default: the directory's, else q4f16_1)")
    add("--opt", default="O1", help="O1 computes with exact activations (default: %(default)s)")
    add("--dump", metavar="FILE", help="write codes, scales and values of everything to a .npz file")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run ``kvq inspect``."""
    from kvq.cli.tables import error_console
    from kvq.compare import parse_schemes
    from kvq.errors import ConfigError
    from kvq.inspect_cache import inspect_prompt

    schemes = parse_schemes(args.kv)
    if len(schemes) != 1:
        raise ConfigError(f"--kv {args.kv!r}: inspect looks at one cache scheme")
    with error_console().status("") as status:
        found = inspect_prompt(
            args.model,
            args.prompt,
            kv=schemes[0],
            quantization=args.quantization,
            opt=args.opt,
            report=status.update,
        )
    pages, layers, heads = found.exact_k.shape[:3]
    for flag, value, count in (
        ("layer", args.layer, layers),
        ("head", args.head, heads),
        ("page", args.page, pages),
    ):
        if value is not None and not 0 <= value < count:
            raise ConfigError(f"--{flag} {value} is outside 0 .. {count - 1}")
    if args.dump:
        found.dump(args.dump)
    print(
        f"{schemes[0]}: {found.layout.bits_per_value:.3f} bits per value; {len(found.tokens)} tokens "
        f"({found.num_prompt} of the prompt), sealed pages of {found.layout.page_size} tokens: {pages}"
    )
    _print_layers(found)
    if args.layer is not None or args.head is not None:
        _print_page(found, args.page, args.layer or 0, args.head or 0)
    return 0


def _print_layers(found: Inspection) -> None:
    from kvq.cli.tables import print_table
    from kvq.inspect_cache import relative_error

    columns = [
        relative_error(found.format_k, found.exact_k, (0, 2, 3, 4)),
        relative_error(found.served_k, found.exact_k, (0, 2, 3, 4)),
        relative_error(found.format_v, found.exact_v, (0, 2, 3, 4)),
        relative_error(found.served_v, found.exact_v, (0, 2, 3, 4)),
    ]
    slides = any(window is not None for window in found.windows)
    print_table(
        "relative RMS error: of the format alone, and as served (with the drift from the layers below)",
        ["layer", *(["sees"] if slides else []), "K format", "K served", "V format", "V served"],
        [
            [
                str(layer),
                *(["all" if window is None else f"{window:,} tokens"] if slides else []),
                *(f"{100 * column[layer]:.2f}%" for column in columns),
            ]
            for layer, window in enumerate(found.windows)
        ],
    )


def _print_page(found: Inspection, page: int, layer: int, head: int) -> None:
    from kvq.cli.tables import print_table

    at = (page, layer, head)
    where = f"page {page}, layer {layer}, KV head {head}"
    exact_k, exact_v = found.exact_k[at], found.exact_v[at]
    rows = []
    widest = (exact_k.max(axis=0) - exact_k.min(axis=0)).argsort()[::-1][:_SHOWN]
    for channel in widest:
        column, served = exact_k[:, channel], found.served_k[at][:, channel]
        row = [str(channel), f"{column.min():.3f} .. {column.max():.3f}", f"{abs(served - column).max():.3f}"]
        if "k_codes" in found.decoded:
            row += [
                f"{found.decoded['k_min'][at][channel]:.3f}",
                f"{found.decoded['k_scale'][at][channel]:.4f}",
            ]
            row.append(_numbers(found.decoded["k_codes"][at][:_CODES, channel]))
        rows.append([*row, _numbers(served[:3], "{:.3f}"), _numbers(column[:3], "{:.3f}")])
    quantized = (
        ["minimum", "scale", f"codes of tokens 0 .. {_CODES - 1}"] if "k_codes" in found.decoded else []
    )
    print_table(
        f"K of {where}: the channels of widest range",
        ["channel", "exact range", "max error", *quantized, "dequantized", "exact"],
        rows,
    )
    rows = []
    for token in range(_SHOWN):
        exact, served = exact_v[token], found.served_v[at][token]
        row = [str(token), f"{abs(exact).max():.3f}", f"{abs(served - exact).max():.3f}"]
        if "v_codes" in found.decoded:
            row.append(f"{found.decoded['v_scale'][at][token]:.4f}")
            row.append(_numbers(found.decoded["v_codes"][at][token, :_CODES]))
        rows.append([*row, _numbers(served[:3], "{:.3f}"), _numbers(exact[:3], "{:.3f}")])
    quantized = (
        ["scale", f"codes of rotated channels 0 .. {_CODES - 1}"] if "v_codes" in found.decoded else []
    )
    print_table(
        f"V of {where}: the first tokens",
        ["token", "max |exact|", "max error", *quantized, "dequantized", "exact"],
        rows,
    )


def _numbers(values: np.ndarray, form: str = "{}") -> str:
    return " ".join(form.format(value) for value in values)
