"""``kvq eval json``: structured answers that are valid under a schema, without a grammar."""

from __future__ import annotations

import argparse
from typing import Any

from kvq.cli.eval.options import add_model, add_output, measure, show

_EXAMPLE = """example:
  kvq eval json smollm2 --tasks 64
  kvq eval json ./out --kv none,int3 --examples 12 --json
"""


def add_parser(kinds: Any) -> None:
    """Add the kind to ``kvq eval``."""
    parser = kinds.add_parser(
        "json",
        help="structured answers valid under a schema, decoded freely",
        description="Shows examples of sentences as JSON objects and asks for more, under each cache scheme.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser, "none,int8,int4,int3")
    add = parser.add_argument
    add(
        "--tasks",
        metavar="N",
        type=int,
        default=64,
        help="sentences to turn into JSON (default: %(default)s)",
    )
    add("--examples", metavar="N", type=int, default=8, help="examples before each (default: %(default)s)")
    add("--seed", metavar="N", type=int, default=0, help="of examples and sentences (default: %(default)s)")
    add_output(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run ``kvq eval json``."""
    from kvq.compare import parse_schemes
    from kvq.eval.structured import evaluate_structured
    from kvq.eval.tables import structured_table

    schemes = parse_schemes(args.kv)
    rows = measure(
        lambda progress, report: evaluate_structured(
            args.model,
            schemes,
            quantization=args.quantization,
            opt=args.opt,
            tasks=args.tasks,
            examples=args.examples,
            seed=args.seed,
            chunk=args.chunk,
            progress=progress,
            report=report,
        ),
        "answering",
    )
    show(args, rows, structured_table)
    return 0
