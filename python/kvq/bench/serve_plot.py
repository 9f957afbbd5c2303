"""The figure of ``kvq bench serve``: how many requests and tokens came within which time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvq.bench.serve import ServeResult
from kvq.eval.plots import check, save


def plot_serve(results: Sequence[ServeResult], path: str | Path) -> None:
    """Write cumulative distributions of the times to first token and between tokens, a server or several.

    Raises
    ------
    ConfigError
        If matplotlib is missing, or the suffix of the path is no format of figures.
    """
    check()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for result in results:
        server = f"{result.url}, " if len(results) > 1 else ""
        done = [record for record in result.records if record.error is None]
        for name, shared in (("shared prefix", True), ("its own prompt", False)):
            times = [record.first_token for record in done if record.shared == shared]
            _distribution(left, times, server + name)
        _distribution(right, [gap for record in done for gap in record.gaps], server + "all requests")
    left.set(xlabel="time to first token, seconds", ylabel="part of the requests", ylim=(0, 1))
    right.set(xlabel="time between tokens, seconds", ylabel="part of the tokens", ylim=(0, 1))
    left.legend()
    save(figure, path)


def _distribution(axes: Any, values: Sequence[float], label: str) -> None:
    if values:
        axes.step(np.sort(values), np.arange(1, len(values) + 1) / len(values), where="post", label=label)
