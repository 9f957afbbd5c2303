"""``kvq eval retrieval``: whether facts that were read are found again, through each cache."""

from __future__ import annotations

import argparse
from typing import Any

from kvq.cli.eval.options import (
    add_model,
    add_output,
    measure,
    names,
    numbers,
    show,
)

_EXAMPLE = """example:
  kvq eval retrieval smollm2 --kv none,int4,int3 --lengths 512,1024 --trials 250
  kvq eval retrieval ./out --task needle --depths 10,50,90 --json
"""


def add_parser(kinds: Any) -> None:
    """Add the kind to ``kvq eval``."""
    parser = kinds.add_parser(
        "retrieval",
        help="needles and key-value pairs found again, over lengths and depths",
        description="Hides facts in prose and asks for them, the same questions under each cache scheme.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser, "none,int8,int4,int3")
    add = parser.add_argument
    add("--task", metavar="LIST", default="needle,kv", help="needle, kv (default: %(default)s)")
    add("--lengths", metavar="LIST", default="512,1024", help="tokens to search (default: %(default)s)")
    add(
        "--depths",
        metavar="LIST",
        default="5,15,25,35,45,55,65,75,85,95",
        help="where the facts stand, in percent (default: %(default)s)",
    )
    add(
        "--trials",
        metavar="N",
        type=int,
        default=100,
        help="questions of each task and length (default: %(default)s)",
    )
    add(
        "--seed", metavar="N", type=int, default=0, help="of places, names and numbers (default: %(default)s)"
    )
    add("--text", metavar="FILE", default="opticks", help="prose to hide in (default: what ships with kvq)")
    add_output(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run ``kvq eval retrieval``."""
    from kvq.compare import parse_schemes
    from kvq.eval.retrieval import evaluate_retrieval
    from kvq.eval.tables import retrieval_table

    schemes = parse_schemes(args.kv)
    lengths, depths = numbers("--lengths", args.lengths), numbers("--depths", args.depths)
    rows = measure(
        lambda progress, report: evaluate_retrieval(
            args.model,
            schemes,
            args.text,
            quantization=args.quantization,
            opt=args.opt,
            tasks=names(args.task),
            lengths=lengths,
            depths=depths,
            trials=args.trials,
            seed=args.seed,
            chunk=args.chunk,
            progress=progress,
            report=report,
        ),
        "asking",
    )
    show(args, rows, retrieval_table)
    return 0
