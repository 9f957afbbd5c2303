"""Render the tables of ``docs/quality.md`` from what ``kvq eval perplexity --json`` printed.

    kvq eval perplexity smollm2 --quantization q0f16 --kv none,int8,int4,int3,peer:all --json > rows.json
    python scripts/quality_table.py rows.json

Rows of several files are joined; files must have scored the same tokens against the same reference. The last
column is a format's KL over that of kvq's int4 or int3, whichever has the same bits a code.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

_COLUMNS = (
    "KV cache",
    "bits",
    "bits at D 128",
    "perplexity",
    "change",
    "KL (nats)",
    "KL p99",
    "same top-1",
    "KL ÷ kvq's",
)
_SAME = ("scored_tokens", "window", "stride", "quantization", "opt")


def read(paths: list[Path]) -> list[dict[str, Any]]:
    """Rows of all files, the reference once, first."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        found = json.loads(path.read_text())
        for row in found:
            if rows and any(row[name] != rows[0][name] for name in _SAME):
                raise SystemExit(f"{path}: {row['kv']} was not scored on what {rows[0]['kv']} was")
            if row["kv"] not in {other["kv"] for other in rows}:
                rows.append(row)
    return rows


def own(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The row of kvq's that a peer is compared with: as many bits a code."""
    bits = re.search(r"^(?:peer|home):.*?(?:int|q|_|-)([2348])", row["kv"])
    name = f"int{bits[1]}" if bits else None
    return next((other for other in rows if other["kv"] == name), None)


def render(rows: list[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "| --- |" + " --- |" * (len(_COLUMNS) - 1)]
    for row in rows:
        ours = own(row, rows)
        cells = [
            row["kv"],
            f"{row['bits_per_value']:.2f}",
            f"{row['bits_per_value_d128']:.2f}",
            f"{row['perplexity']:.3f}",
            f"{row['delta_percent']:+.2f}% ± {row['delta_stderr']:.2f}",
            f"{row['kl']:.5f} ± {row['kl_stderr']:.5f}",
            f"{row['kl_p99']:.4f}",
            f"{row['top1_percent']:.1f}%",
            f"{row['kl'] / ours['kl']:.1f}" if ours and ours["kl"] else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line and print the table, and what was scored."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="outputs of kvq eval perplexity --json")
    rows = read(parser.parse_args().files)
    first = rows[0]
    print(f"Weights {first['quantization']}, {first['opt']}; {first['scored_tokens']:,} tokens in windows")
    print(f"of {first['window']:,}, prefill chunk {first['chunk']}; against {first['kv']}.\n")
    print(render(rows))


if __name__ == "__main__":
    main()
