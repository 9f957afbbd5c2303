"""Options that the kinds of evaluation share, and what they do with them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvq.errors import ConfigError

if TYPE_CHECKING:
    from kvq.eval.tables import Table

#: What is done with (done, to do) and with what is being prepared.
Work = Callable[[Callable[[int, int], None], Callable[[str], None]], list[dict[str, Any]]]


def add_model(parser: argparse.ArgumentParser, schemes: str) -> None:
    """Add the model, the schemes, and how both are compiled."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="smollm2, a .gguf file, a checkpoint, or a converted directory")
    add("--quantization", metavar="Q", help="weight scheme (default: the model's own, else q4f16_1)")
    add(
        "--kv",
        metavar="LIST",
        default=schemes,
        help="cache schemes; the first is what the others are compared with (default: %(default)s)",
    )
    add("--opt", default="O1", help="O1 computes with exact activations (default: %(default)s)")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the size of a step, and how the rows are printed."""
    add = parser.add_argument
    add("--chunk", metavar="N", type=int, default=512, help="tokens of a step (default: %(default)s)")
    add("--json", action="store_true", help="print a JSON list, an object a row of the table")


def numbers(option: str, text: str) -> list[int]:
    """Read ``512,1024``.

    Raises
    ------
    ConfigError
        If a part is not a whole number, or there is none.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() for part in parts):
        raise ConfigError(f"{option} {text}: need whole numbers, such as 512,1024")
    return [int(part) for part in parts]


def names(text: str) -> list[str]:
    """Read ``needle,kv``: names without blanks, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def measure(work: Work, description: str) -> list[dict[str, Any]]:
    """Run an evaluation under a progress bar on stderr."""
    from rich.progress import Progress

    from kvq.cli.tables import error_console

    console = error_console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("preparing", total=None)
        return work(
            lambda done, total: bar.update(task, completed=done, total=total, description=description),
            lambda text: bar.update(task, description=text),
        )


def show(
    args: argparse.Namespace, rows: list[dict[str, Any]], table_of: Callable[[list[dict[str, Any]]], Table]
) -> None:
    """Print rows as a table, or for another program where ``--json`` is given."""
    from kvq.cli.tables import print_table

    if args.json:
        print(json.dumps(rows, indent=2))
        return
    table = table_of(rows)
    print_table(f"{args.model}: {table.title}", table.columns, table.rows)
    print("\n".join(table.notes))
