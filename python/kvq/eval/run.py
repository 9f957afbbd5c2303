"""``kvq eval perplexity``, from names to rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvq.compare import Comparison, Report
from kvq.errors import ConfigError
from kvq.eval.compiled import CompiledPrefiller
from kvq.eval.perplexity import Progress, check_sizes, rows_of, score
from kvq.eval.text import read_text
from kvq.tokenizer import Tokenizer


def evaluate_perplexity(
    model: str,
    schemes: Sequence[str],
    text: str,
    *,
    quantization: str | None = None,
    opt: str = "O1",
    max_tokens: int = 12288,
    window: int = 1024,
    stride: int | None = None,
    chunk: int = 256,
    progress: Progress | None = None,
    report: Report | None = None,
) -> list[dict[str, Any]]:
    """Score a text under several cache schemes.

    Parameters
    ----------
    model, quantization, opt : str
        As :class:`kvq.compare.Comparison` takes them.
    schemes : sequence of str
        Cache schemes; the first is the reference of the others.
    text : str
        A file, or the name of a text that ships with kvq.
    max_tokens, window, stride, chunk : int
        In tokens; the stride is the window by default.
    progress : callable, optional
        Called with (tokens read, tokens to read).
    report : callable, optional
        Called with what is being prepared.

    Returns
    -------
    list of dict
        The fields of :class:`kvq.eval.perplexity.Row`, ``quantization`` and ``opt``; a dict a scheme.

    Raises
    ------
    KvqError
        If an argument, the text or the model is unsuitable.
    """
    sizes = {"window": window, "stride": window if stride is None else stride, "chunk": chunk}
    check_sizes(**sizes)
    content = read_text(text)
    comparison = Comparison(model, quantization, schemes, opt, report)
    tokens = np.array(Tokenizer.from_dir(comparison.config_dir).encode(content)[:max_tokens], np.int32)
    if len(tokens) < 2:
        raise ConfigError(f"--text {text}: {len(tokens)} tokens are too few: perplexity needs at least 2")
    models = comparison.load(window, chunk)
    prefillers = [CompiledPrefiller(loaded) for loaded in models]
    scores = score(prefillers, tokens, **sizes, progress=progress)
    rows = rows_of(schemes, [loaded.layout for loaded in models], scores, **sizes)
    weights = models[0].metadata.quantization
    return [{**row.to_dict(), "quantization": weights, "opt": opt} for row in rows]
