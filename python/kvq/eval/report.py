"""``kvq eval report``: all evaluations of one model on one page, which needs nothing beside itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq import __version__
from kvq.compare import Report
from kvq.errors import ConfigError
from kvq.eval import plots, tables
from kvq.eval.generate import evaluate_generate
from kvq.eval.retrieval import evaluate_retrieval
from kvq.eval.run import evaluate_perplexity
from kvq.eval.structured import evaluate_structured
from kvq.eval.text import DEFAULT_TEXT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[dict[str, Any]]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Section:
    """A kind of evaluation: how it is run, and how its rows are shown.

    Attributes
    ----------
    heading, meaning : str
        For the page.
    evaluate : callable
        ``evaluate(model, schemes, **options)`` returns rows.
    quick, full : dict
        Options: minutes, or as much as the figures of the documentation take.
    """

    heading: str
    meaning: str
    evaluate: Callable[..., list[dict[str, Any]]]
    quick: dict[str, Any]
    full: dict[str, Any]
    table: Callable[[Rows], tables.Table]
    figure: Callable[[Rows], Figure]


#: By the name of the command that prints the same rows, in the order of the page.
SECTIONS = {
    "perplexity": Section(
        "Perplexity and divergence",
        "Every token of a text is predicted from those before it. KL is the divergence of the distribution "
        "from the reference's, in nats a token; top-1 says how often both would choose the same token.",
        evaluate_perplexity,
        {"text": DEFAULT_TEXT, "max_tokens": 4096},
        {"text": DEFAULT_TEXT, "max_tokens": 32768},
        tables.perplexity_table,
        plots.perplexity_figure,
    ),
    "retrieval": Section(
        "Retrieval",
        "Numbers are hidden in prose and asked for: in sentences of different kinds (needle), or in "
        "sentences that differ in one word (kv). Found means that greedy decoding says the number.",
        evaluate_retrieval,
        {"lengths": (512,), "trials": 40},
        {"lengths": (512, 1024), "trials": 250},
        tables.retrieval_table,
        plots.retrieval_figure,
    ),
    "generate": Section(
        "Greedy agreement",
        "Passages of prose and code are continued greedily. Caches that differ in the last bits part sooner "
        "or later, so the distances mean something only beside those of a cache that merely rounds.",
        evaluate_generate,
        {"prompts": 8, "tokens": 64},
        {"prompts": 32, "tokens": 128},
        tables.generate_table,
        plots.generate_figure,
    ),
    "json": Section(
        "Structured answers",
        "Sentences are turned into JSON objects after a few examples, decoded freely: no grammar helps.",
        evaluate_structured,
        {"tasks": 16},
        {"tasks": 64},
        tables.structured_table,
        plots.structured_figure,
    ),
}


def evaluate_all(
    model: str,
    schemes: Sequence[str],
    *,
    quantization: str | None = None,
    opt: str = "O1",
    full: bool = False,
    known: Mapping[str, Rows] | None = None,
    progress: Callable[[str], Progress] | None = None,
    report: Report | None = None,
) -> dict[str, Rows]:
    """Run every evaluation that is not known yet.

    Parameters
    ----------
    model, quantization, opt : str
        As :class:`kvq.compare.Comparison` takes them.
    schemes : sequence of str
        Cache schemes; the first is the reference of the others.
    full : bool
        Take as much text and as many questions as the figures of the documentation do.
    known : mapping, optional
        Rows by the name of the section, as ``--json`` of its command prints them.
    progress : callable, optional
        Called with the name of a section; returns what is called with (done, to do).
    report : callable, optional
        Called with what is being prepared.

    Returns
    -------
    dict
        Rows by the name of the section, in the order of :data:`SECTIONS`.

    Raises
    ------
    KvqError
        If an argument or the model is unsuitable, or a package of the extra ``eval`` is missing.
    """
    plots.check()
    results: dict[str, Rows] = {}
    for name, section in SECTIONS.items():
        if known and name in known:
            results[name] = known[name]
            continue
        options = section.full if full else section.quick
        results[name] = section.evaluate(
            model,
            schemes,
            quantization=quantization,
            opt=opt,
            progress=progress(name) if progress else None,
            report=report,
            **options,
        )
    return results


def render(model: str, results: Mapping[str, Rows]) -> str:
    """The page, HTML, of rows by the name of their section.

    Raises
    ------
    ConfigError
        If the rows of a section are not what its command prints, or matplotlib is missing.
    """
    from jinja2 import Environment

    sections = []
    for name, rows in results.items():
        section = SECTIONS[name]
        try:
            table, figure = section.table(rows), section.figure(rows)
        except (KeyError, IndexError, TypeError) as problem:
            raise ConfigError(
                f"the rows of {name} are not what kvq eval {name} --json prints: "
                f"{type(problem).__name__} {problem}"
            ) from None
        sections.append(
            {
                "kind": name,
                "heading": section.heading,
                "meaning": section.meaning,
                "table": table,
                "figure": plots.inline_svg(figure),
            }
        )
    source = (files("kvq.eval") / "report.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True).from_string(source)
    return template.render(model=model, version=__version__, sections=sections)


def write(page: str, path: str | Path) -> None:
    """Write the page under a temporary name and rename it."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
