"""Figures of ``kvq bench decode`` and ``prefill``: tokens per second over context and batch, and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvq.errors import ConfigError
from kvq.eval.plots import check, check_suffix, save

_COLUMNS = (
    *("device", "quantization", "kv", "batch", "context", "tokens", "chunk"),
    *("tokens_per_second", "slowest", "fastest", "ratio", "rounds"),
)


def check_plot(path: str | Path) -> None:
    """Refuse a plot that could not be written, before anything is measured; raises ConfigError."""
    check()
    check_suffix(path)


def write_csv(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Write the rows, one a line.

    Raises
    ------
    ConfigError
        If the file cannot be written.
    """
    columns = [name for name in _COLUMNS if name in rows[0]]
    try:
        with Path(path).open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ConfigError(f"--csv {path}: {error.strerror}") from None


def plot_rates(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Draw tokens per second, a line a scheme or peer: a panel a batch, and one over the batches.

    Parameters
    ----------
    rows : sequence of dict
        Of :func:`kvq.bench.run.bench_decode` or :func:`kvq.bench.run.bench_prefill`.
    path : str or Path
        Where to write; the suffix decides the format.

    Raises
    ------
    ConfigError
        If matplotlib is missing, or the suffix is no format of figures.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    size = "context" if "context" in rows[0] else "tokens"
    batches = sorted({row.get("batch", 1) for row in rows})
    panels = [(size, "batch", batch) for batch in batches]
    if len(batches) > 1:
        panels += [("batch", size, context) for context in sorted({row[size] for row in rows})]
    figure = Figure(figsize=(1 + 3.2 * len(panels), 3.4), layout="constrained")
    for axes, (over, fixed, value) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        for name in dict.fromkeys(row["kv"] for row in rows):
            points = sorted(
                (row.get(over, 1), row["tokens_per_second"])
                for row in rows
                if row["kv"] == name and row.get(fixed, 1) == value
            )
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set(xlabel=over, title=f"{fixed} {value}", ylim=(0, None))
        axes.set_xscale("log", base=2)
    first = figure.axes[0]
    first.set_ylabel("tokens per second")
    first.legend()
    save(figure, path)
