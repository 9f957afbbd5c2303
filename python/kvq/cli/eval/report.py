"""``kvq eval report``: all evaluations on one page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvq.cli.eval.options import add_model
from kvq.errors import ConfigError

_EXAMPLE = """example:
  kvq eval report smollm2 -o report.html
  kvq eval report ./out --full --results results.json -o report.html
  kvq eval report ./out --rows perplexity=perplexity.json -o report.html
"""


def add_parser(kinds: Any) -> None:
    """Add the kind to ``kvq eval``."""
    parser = kinds.add_parser(
        "report",
        help="perplexity, retrieval, generate and json on one self-contained page",
        description="Runs all evaluations and writes one HTML page with tables and plots.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser, "float32,none,int8,int4,int3")
    add = parser.add_argument
    add("-o", "--output", metavar="FILE", required=True, help="the page to write")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--quick", action="store_true", help="minutes on a small model (the default)")
    budget.add_argument("--full", action="store_true", help="as much as the documented figures take")
    add(
        "--rows",
        metavar="KIND=FILE",
        action="append",
        default=[],
        help="take what kvq eval KIND --json printed instead of running it; may be repeated",
    )
    add("--results", metavar="FILE", help="write the rows of all kinds as JSON, too")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run ``kvq eval report``."""
    from rich.progress import Progress

    from kvq.cli.tables import error_console
    from kvq.compare import parse_schemes
    from kvq.eval.report import SECTIONS, evaluate_all, render, write

    schemes = parse_schemes(args.kv)
    known = dict(_read(word, tuple(SECTIONS)) for word in args.rows)
    directory = Path(args.output).parent
    if not directory.is_dir():
        raise ConfigError(f"-o {args.output}: there is no directory {directory}")
    console = error_console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("preparing", total=None)
        results = evaluate_all(
            args.model,
            schemes,
            quantization=args.quantization,
            opt=args.opt,
            full=args.full,
            known=known,
            progress=lambda name: (
                lambda done, total: bar.update(task, completed=done, total=total, description=name)
            ),
            report=lambda text: bar.update(task, description=text),
        )
    if args.results:
        write(json.dumps(results, indent=2) + "\n", args.results)
    write(render(args.model, results), args.output)
    print(f"{args.output}: {', '.join(results)}")
    return 0


def _read(word: str, kinds: tuple[str, ...]) -> tuple[str, list[dict[str, Any]]]:
    """Read ``KIND=FILE``."""
    kind, _, name = word.partition("=")
    if kind not in kinds or not name:
        raise ConfigError(f"--rows {word}: need KIND=FILE with a kind of {', '.join(kinds)}")
    try:
        rows = json.loads(Path(name).read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ConfigError(f"--rows {word}: not JSON: {problem}") from None
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"--rows {word}: need the list that kvq eval {kind} --json prints")
    return kind, rows
