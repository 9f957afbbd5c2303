"""The tables of the evaluations: rows as ``--json`` prints them in, text for people out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Table:
    """A table to print or to put into a page.

    Attributes
    ----------
    title : str
        What was measured, on how much.
    columns, rows : list
        Heads and cells; the first column is text, and so is ``task``; the others are numbers.
    notes : list of str
        What the table needs to be understood, a line each.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]


def perplexity_table(rows: Rows) -> Table:
    """Of ``kvq eval perplexity``."""
    first = rows[0]
    return Table(
        f"weights {first['quantization']}, {first['opt']}, {first['scored_tokens']} tokens scored in windows "
        f"of {first['window']}",
        ["kv", "bits", "at D 128", "perplexity", "±", "delta", "±", "KL (nats)", "±", "KL p99", "same top-1"],
        [
            [
                row["kv"],
                f"{row['bits_per_value']:.2f}",
                f"{row['bits_per_value_d128']:.2f}",
                f"{row['perplexity']:.3f}",
                f"{row['stderr']:.3f}",
                f"{row['delta_percent']:+.2f}%",
                f"{row['delta_stderr']:.2f}",
                f"{row['kl']:.5f}",
                f"{row['kl_stderr']:.5f}",
                f"{row['kl_p99']:.3f}",
                f"{row['top1_percent']:.1f}%",
            ]
            for row in rows
        ],
        [
            f"against {first['kv']}; prefill chunk: {first['chunk']} tokens",
            *(f"{row['kv']}: {row['scheme']}; {row['attends']}" for row in rows),
        ],
    )


def retrieval_table(rows: Rows) -> Table:
    """Of ``kvq eval retrieval``."""
    first = rows[0]
    lengths = sorted({cell["length"] for cell in first["cells"]})
    return Table(
        f"weights {first['quantization']}, {first['opt']}, {first['trials']} questions a task on "
        f"{', '.join(map(str, lengths))} tokens",
        ["kv", "task", "bits", "found", "percent", "points", "±", "lost", "gained", "p"],
        [
            [
                row["kv"],
                row["task"],
                f"{row['bits_per_value']:.2f}",
                f"{row['hits']}",
                f"{row['percent']:.1f}%",
                f"{row['delta_points']:+.1f}",
                "" if row["delta_stderr"] is None else f"{row['delta_stderr']:.1f}",
                f"{row['lost']}",
                f"{row['gained']}",
                f"{row['p_value']:.3f}",
            ]
            for row in rows
        ],
        [
            f"points, lost and gained are against {first['kv']}; p is McNemar's, exact; prefill chunk: "
            f"{first['chunk']} tokens",
            *_attends(rows),
        ],
    )


def generate_table(rows: Rows) -> Table:
    """Of ``kvq eval generate``."""
    first = rows[0]
    return Table(
        f"weights {first['quantization']}, {first['opt']}, {first['prompts']} prompts of "
        f"{first['prompt_tokens']} tokens, {first['tokens']} tokens each, greedy",
        ["kv", "bits", "first difference (median)", "mean", "identical"],
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
        [f"compared with {first['kv']}; prefill chunk: {first['chunk']} tokens", *_attends(rows)],
    )


def structured_table(rows: Rows) -> Table:
    """Of ``kvq eval json``."""
    first = rows[0]
    return Table(
        f"weights {first['quantization']}, {first['opt']}, {first['tasks']} tasks after {first['examples']} "
        "examples, greedy, no grammar",
        ["kv", "bits", "JSON", "valid", "correct", "same"],
        [
            [
                row["kv"],
                f"{row['bits_per_value']:.2f}",
                *(f"{row[f'{what}_percent']:.1f}%" for what in ("json", "valid", "correct", "same")),
            ]
            for row in rows
        ],
        [
            f"same: the text that {first['kv']} answers; prefill chunk: {first['chunk']} tokens",
            *_attends(rows),
        ],
    )


def _attends(rows: Rows) -> list[str]:
    """What the tokens of the answers attended to, a line a row."""
    return [
        f"{' '.join(row[key] for key in ('kv', 'task') if key in row)}: attends to quantized pages: "
        f"{row['quantized_keys']} of {row['keys']} keys"
        for row in rows
    ]
