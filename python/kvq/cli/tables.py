"""How the commands print: tables on stdout that survive a pipe, progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def error_console() -> Console:
    """A console on stderr."""
    from rich.console import Console

    return Console(stderr=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int = 1) -> None:
    """Print a table; the first ``texts`` columns are text, the others are numbers.

    Lines are not folded where stdout is no terminal, so that a file or a pipe gets whole lines.
    """
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < texts else "right", no_wrap=not 0 < index < texts)
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(f"\n{title}", markup=False, highlight=False)
    console.print(table)
