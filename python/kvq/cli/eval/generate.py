"""``kvq eval generate``: how long greedy answers agree with the reference."""

from __future__ import annotations

import argparse
from typing import Any

from kvq.cli.eval.options import add_model, add_output, measure, names, show

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
    add_output(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run ``kvq eval generate``."""
    from kvq.compare import parse_schemes
    from kvq.eval.generate import evaluate_generate
    from kvq.eval.tables import generate_table

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
    show(args, rows, generate_table)
    return 0
