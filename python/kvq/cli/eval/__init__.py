"""``kvq eval``: what each cache scheme costs in quality. A module a kind of evaluation; each parses only."""

from __future__ import annotations

import argparse
from typing import Any

from kvq.cli.eval import generate, json, perplexity, report, retrieval

NAME = "eval"

_KINDS = (perplexity, retrieval, generate, json, report)

_EXAMPLE = """example:
  kvq eval perplexity smollm2 --kv none,int8,int4,int3
  kvq eval retrieval smollm2 --kv none,int4,int3
  kvq eval report smollm2 -o report.html
"""


def add_parser(subparsers: Any) -> None:
    """Add the command to ``kvq``."""
    parser = subparsers.add_parser(
        NAME,
        help="quality of the cache schemes, through the compiled library",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for kind in _KINDS:
        kind.add_parser(kinds)
