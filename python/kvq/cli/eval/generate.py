"""``kvq eval generate``: how long greedy answers agree with the reference."""

from __future__ import annotations

import argparse
from typing import Any

from kvq.cli.eval.options import add_json, add_model, measure, names, print_json, print_quantized_keys

_EXAMPLE = """example:
  kvq eval generate smollm2 --prompts 32 --tokens 128
  kvq eval generate ./out --kv none,int4 --text notes.txt --json
"""


def add_parser(kinds: Any) -> None:
    """Add the kind to ``kvq eval``."""
    parser = kinds.add_parser(
        "generate",
        help="greedy agreement: tokens until the first that differs",
        description="Continues passages greedily under each cache scheme and looks for the first difference.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser, "float32,none,int8,int4,int3")
    add = parser.add_argument
    add("--prompts", metavar="N", type=int, default=32, help="passages to continue (default: %(default)s)")
    add("--prompt-tokens", metavar="N", type=int, default=384, help="of a passage (default: %(default)s)")
    add("--tokens", metavar="N", type=int, default=128, help="of an answer (default: %(default)s)")
    add("--text", metavar="LIST", default="opticks,code", help="texts or files (default: %(default)s)")
    add_json(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run ``kvq eval generate``."""
    from kvq.compare import parse_schemes
    from kvq.eval.generate import evaluate_generate

    schemes = parse_schemes(args.kv)
    rows = measure(
        lambda progress, report: evaluate_generate(
            args.model,
            schemes,
            names(args.text),
            quantization=args.quantization,
            opt=args.opt,
            prompts=args.prompts,
            prompt_tokens=args.prompt_tokens,
            tokens=args.tokens,
            chunk=args.chunk,
            progress=progress,
            report=report,
        ),
        "answering",
    )
    if args.json:
        print_json(rows)
    else:
        _print(args.model, rows)
    return 0


def _print(model: str, rows: list[dict[str, Any]]) -> None:
    from kvq.cli.tables import print_table

    first = rows[0]
    print_table(
        f"{model}: weights {first['quantization']}, {first['opt']}, {first['prompts']} prompts of "
        f"{first['prompt_tokens']} tokens, {first['tokens']} tokens each, greedy",
        ["kv", "bits/value", "first difference (median)", "mean", "identical"],
        [
            [
                row["kv"],
                f"{row['bits_per_value']:.2f}",
                f"{row['median_divergence']:g}",
                f"{row['mean_divergence']:.1f}",
                f"{row['identical_percent']:.0f}%",
            ]
            for row in rows
        ],
    )
    print(f"prefill chunk: {first['chunk']} tokens; compared with {first['kv']}")
    print_quantized_keys(rows)
