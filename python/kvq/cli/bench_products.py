"""``kvq bench products``: the matrix products of a decode step on a GPU, each by itself."""

from __future__ import annotations

import argparse
import json
from typing import Any

from kvq.cli.bench_model import add_model, bench_setup, compile_libraries, numbers

_EXAMPLE = """example:
  kvq bench products llama-3-8b --random-weights
  kvq bench products llama-3-8b --random-weights --compile-only --libraries DIR   (no GPU needed)
  kvq bench products llama-3-8b --random-weights --libraries DIR --rows 1,16
"""
#: Cache of the library, which products do not depend on.
_KV = "int4"


def add_kind(kinds: Any) -> None:
    """Add the kind to ``kvq bench``."""
    text = "the products of a decode step on a GPU, against a copy within its memory"
    parser: argparse.ArgumentParser = kinds.add_parser(
        "products",
        help=text,
        description=f"Measures {text}: each alone and in the step, with what the compiler made part of it.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser, ["cuda"])
    parser.add_argument(
        "--rows", metavar="LIST", default="1,4,16,64", help="rows of the step (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run ``kvq bench products``."""
    from kvq.bench.products import bench_products
    from kvq.cli.tables import error_console

    rows = numbers(args.rows, "--rows")
    setup = bench_setup(args, [_KV])
    with error_console().status("") as status:
        if args.compile_only:
            compile_libraries(args, setup, 1, status.update)
            return 0
        figures, copy_rate = bench_products(setup, rows, status.update)
    if args.json:
        found = {"copy_tb_per_s": copy_rate / 1e12, "figures": [f.to_dict() for f in figures]}
        print(json.dumps(found, indent=2))
    else:
        _print(args.model, figures, copy_rate)
    return 0


def _print(model: str, figures: list[Any], copy_rate: float) -> None:
    from kvq.cli.tables import print_table

    def us(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    def percent(value: float | None) -> str:
        return "" if value is None else f"{value:.0%}"

    print_table(
        f"products of a decode step, {model}; copy {copy_rate / 1e12:.2f} TB/s",
        ["weight", "outputs x inputs", "rows", "launches", "us", "of copy", "us in the step", "of copy"],
        [
            [
                f.weight,
                f"{f.outputs} x {f.inputs}" if f.outputs else "",
                str(f.rows),
                str(f.launches),
                us(f.us),
                percent(f.of_copy),
                us(f.us_in_step),
                percent(f.of_copy_in_step),
            ]
            for f in figures
        ],
        texts=2,
    )
