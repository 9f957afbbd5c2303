"""``kvq eval perplexity``, from names to rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvq.compare import Comparison, Report, parse_schemes
from kvq.errors import ConfigError
from kvq.eval.codecs import HOME_PREFIX, PEER_PREFIX, PEERS, peer_codec
from kvq.eval.compiled import CodecPrefiller, CompiledPrefiller, HomePrefiller
from kvq.eval.perplexity import REFERENCE, Progress, check_sizes, rows_of, score
from kvq.eval.text import read_text
from kvq.quantization.scheme import EXACT
from kvq.tokenizer import Tokenizer

_KINDS: dict[str, type[CodecPrefiller]] = {PEER_PREFIX: CodecPrefiller, HOME_PREFIX: HomePrefiller}


def parse_columns(text: str, reference: str = REFERENCE) -> list[str]:
    """Read ``none,int4,peer:kivi-int4``: the reference first, then the others in the order given, each once.

    ``peer:all`` stands for all codecs of :data:`kvq.eval.codecs.PEERS`, ``home:all`` for those that work
    token by token.

    Raises
    ------
    ConfigError
        If a name is unknown, or there is none.
    """
    names = parse_schemes(reference)
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part == f"{PEER_PREFIX}all":
            names += [PEER_PREFIX + name for name in PEERS]
        elif part == f"{HOME_PREFIX}all":
            names += [HOME_PREFIX + name for name, codec in PEERS.items() if codec.per_token]
        elif part.startswith((PEER_PREFIX, HOME_PREFIX)):
            peer_codec(part)
            names.append(part)
        else:
            names += parse_schemes(part)
    return list(dict.fromkeys(names))


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
        Cache schemes, and codecs after ``peer:`` or ``home:``; the first, a scheme, is the reference.
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
    kinds = [_KINDS.get(name.partition(":")[0] + ":") for name in schemes]
    libraries = [EXACT if kind else name for kind, name in zip(kinds, schemes, strict=True)]
    comparison = Comparison(model, quantization, libraries, opt, report)
    tokens = np.array(Tokenizer.from_dir(comparison.config_dir).encode(content)[:max_tokens], np.int32)
    if len(tokens) < 2:
        raise ConfigError(f"--text {text}: {len(tokens)} tokens are too few: perplexity needs at least 2")
    models = comparison.load(window, chunk)
    prefillers = [
        kind(loaded, peer_codec(name)) if kind else CompiledPrefiller(loaded)
        for loaded, name, kind in zip(models, schemes, kinds, strict=True)
    ]
    scores = score(prefillers, tokens, **sizes, progress=progress)
    rows = rows_of(schemes, prefillers, scores, **sizes)
    weights = models[0].metadata.quantization
    return [{**row.to_dict(), "quantization": weights, "opt": opt} for row in rows]
