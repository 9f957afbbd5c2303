"""Plots of the evaluations: rows as ``--json`` prints them in, a file or inline SVG out.

Nothing else of the evaluation knows matplotlib, which the extra ``eval`` brings.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Of a colour-blind-safe palette, in the order of the schemes.
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000")
_SUFFIXES = (".svg", ".png", ".pdf")


def plot_perplexity(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Write the figure of ``kvq eval perplexity``: KL and perplexity over bits per value.

    Parameters
    ----------
    rows : sequence of dict
        Rows of ``kvq eval perplexity --json``; the first is the reference.
    path : str or Path
        Where to write; the suffix decides the format: ``.svg``, ``.png`` or ``.pdf``.

    Raises
    ------
    ConfigError
        If matplotlib is missing, or the suffix is none of these.
    """
    save(perplexity_figure(rows), path)


def perplexity_figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """KL divergence (logarithmic) and change of perplexity (percent) of each scheme over its bits."""
    figure = _figure(2)
    left, right = figure.subplots(1, 2)
    reference = rows[0]["kv"]
    for index, row in enumerate(rows[1:]):
        style = {"color": _colour(index + 1), "marker": "o", "linestyle": "none"}
        # An equal distribution has no place on a logarithmic axis.
        left.plot(row["bits_per_value"], max(row["kl"], 1e-7), label=row["kv"], **style)
        right.errorbar(
            row["bits_per_value"],
            row["delta_percent"],
            yerr=row["delta_stderr"],
            capsize=3,
            label=row["kv"],
            **style,
        )
    left.set(yscale="log", xlabel="bits per value", ylabel="KL divergence, nats")
    right.axhline(0, color="#888888", linewidth=0.8)
    right.set(xlabel="bits per value", ylabel="change of perplexity, %")
    for axes in (left, right):
        axes.set_title(f"against {reference}", fontsize=9)
        axes.grid(alpha=0.3)
    if len(rows) > 1:
        left.legend(frameon=False, fontsize=8)
    return figure


def retrieval_figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """Percent of the answers found over the depth, a panel a task and length, a line a scheme."""
    panels = list(dict.fromkeys((row["task"], cell["length"]) for row in rows for cell in row["cells"]))
    figure = _figure(len(panels))
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (task, length) in zip(all_axes, panels, strict=True):
        for index, row in enumerate(row for row in rows if row["task"] == task):
            cells = [cell for cell in row["cells"] if cell["length"] == length]
            axes.plot(
                [cell["depth"] for cell in cells],
                [100 * cell["hits"] / cell["trials"] for cell in cells],
                color=_colour(index),
                marker="o",
                markersize=3,
                label=row["kv"],
            )
        axes.set(xlabel="depth, %", ylim=(-3, 103))
        axes.set_title(f"{task}, {length} tokens", fontsize=9)
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("found, %")
    all_axes[0].legend(frameon=False, fontsize=8)
    return figure


def generate_figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """Share of the answers that still agree with the reference after so many tokens, a step a scheme."""
    figure = _figure(1)
    axes = figure.subplots()
    tokens = rows[0]["tokens"]
    for index, row in enumerate(rows):
        ends = sorted(row["divergence"])
        share = [100 * sum(end > at for end in ends) / len(ends) for at in range(tokens)]
        axes.step(range(1, tokens + 1), share, where="post", color=_colour(index), label=row["kv"])
    axes.set(xlabel="tokens generated", ylabel="same answer so far, %", ylim=(-3, 103))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return figure


def structured_figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """Percent of the answers that are JSON, valid under the schema, correct, and those of the reference."""
    figure = _figure(1)
    axes = figure.subplots()
    kinds = {
        "json_percent": "JSON",
        "valid_percent": "valid",
        "correct_percent": "correct",
        "same_percent": "same",
    }
    width = 0.8 / len(rows)
    for index, row in enumerate(rows):
        places = [place + width * index for place in range(len(kinds))]
        axes.bar(places, [row[kind] for kind in kinds], width, color=_colour(index), label=row["kv"])
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(kinds))], list(kinds.values()))
    axes.set(ylabel="answers, %", ylim=(0, 105))
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure in the format of the path's suffix, under a temporary name first.

    Raises
    ------
    ConfigError
        If the suffix is none of ``.svg``, ``.png`` and ``.pdf``.
    """
    check_suffix(path)
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_suffix(path: str | Path) -> None:
    """Refuse a name whose suffix is no format of figures.

    Raises
    ------
    ConfigError
    """
    if Path(path).suffix.lower() not in _SUFFIXES:
        raise ConfigError(
            f"--plot {path}: the name must end in {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}"
        )


def inline_svg(figure: Figure) -> str:
    """A figure as an ``<svg>`` element to put into a page; the same figure gives the same text."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "kvq", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def check() -> None:
    """Refuse what will need plots, before hours of work.

    Raises
    ------
    ConfigError
        If matplotlib is missing.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("plots need matplotlib: install kvq[eval]") from None


def _figure(panels: int) -> Figure:
    check()
    from matplotlib.figure import Figure

    return Figure(figsize=(1.2 + 3.4 * panels, 3.2), layout="constrained")


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]
