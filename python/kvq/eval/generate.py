"""``kvq eval generate``: how long greedy answers stay those of the reference, scheme by scheme.

The prompts are passages of texts, long enough to lie in sealed pages. Two caches that differ in the last bits
part sooner or later, so the distances mean something only beside those of a cache that merely rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kvq.compare import Comparison, Report
from kvq.errors import ConfigError, check_positive
from kvq.eval.answers import Answers
from kvq.eval.text import SHIPPED, read_text
from kvq.tokenizer import Tokenizer

Progress = Callable[[int, int], None]

#: Prompts that run at once.
BATCH = 16


def passages(texts: Sequence[Sequence[int]], count: int, tokens: int) -> list[list[int]]:
    """``count`` prompts of ``tokens`` tokens, taken from the texts in turn, evenly spread over each.

    Raises
    ------
    ConfigError
        If a text is shorter than a prompt.
    """
    prompts = []
    for number in range(count):
        text = texts[number % len(texts)]
        if len(text) < tokens:
            raise ConfigError(f"--prompt-tokens {tokens}: a text has only {len(text)} tokens: ask for fewer")
        of_text = len(range(number % len(texts), count, len(texts)))
        start = (len(text) - tokens) * (number // len(texts)) // of_text
        prompts.append(list(text[start : start + tokens]))
    return prompts


def divergence(answer: Sequence[int], reference: Sequence[int]) -> int:
    """Tokens before the first that differs; all of them where none does."""
    pairs = enumerate(zip(answer, reference, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(answer))


def evaluate_generate(
    model: str,
    schemes: Sequence[str],
    texts: Sequence[str] = tuple(SHIPPED),
    *,
    quantization: str | None = None,
    opt: str = "O1",
    prompts: int = 32,
    prompt_tokens: int = 384,
    tokens: int = 128,
    chunk: int = 512,
    progress: Progress | None = None,
    report: Report | None = None,
) -> list[dict[str, Any]]:
    """Let every scheme continue the same prompts greedily.

    Parameters
    ----------
    model, quantization, opt : str
        As :class:`kvq.compare.Comparison` takes them.
    schemes : sequence of str
        Cache schemes; the first is the reference of the others.
    texts : sequence of str
        Where the prompts are taken from: files, or names of texts that ship with kvq.
    prompts, prompt_tokens, tokens : int
        How many prompts, and the tokens of a prompt and of an answer. An end-of-text token ends no answer.
    progress : callable, optional
        Called with (answers, answers to come).
    report : callable, optional
        Called with what is being prepared.

    Returns
    -------
    list of dict
        ``kv prompts prompt_tokens tokens divergence`` (tokens before the first difference, of each prompt)
        ``median_divergence mean_divergence identical_percent bits_per_value quantized_keys keys quantization
        opt chunk``; a dict a scheme.

    Raises
    ------
    KvqError
        If an argument, a text or the model is unsuitable.
    """
    check_positive(prompts=prompts, prompt_tokens=prompt_tokens, tokens=tokens)
    if not texts:
        raise ConfigError(f"--text names no text: use for example {','.join(SHIPPED)}")
    contents = [read_text(text) for text in texts]
    comparison = Comparison(model, quantization, schemes, opt, report)
    tokenizer = Tokenizer.from_dir(comparison.config_dir)
    begin = tokenizer.encode("", add_special_tokens=True)
    asked = passages([tokenizer.encode(content) for content in contents], prompts, prompt_tokens)
    length = len(begin) + prompt_tokens + tokens
    models = comparison.load(length, chunk, BATCH + 1, length)
    rows: list[dict[str, Any]] = []
    reference: list[list[int]] = []
    for number, (scheme, loaded) in enumerate(zip(schemes, models, strict=True)):
        answerer = Answers(loaded, chunk, tokenizer.vocab_size)
        answerer.begin(begin)
        answers: list[list[int]] = []
        for start in range(0, prompts, BATCH):
            answers += answerer.greedy(asked[start : start + BATCH], tokens)
            if progress is not None:
                progress(number * prompts + len(answers), len(schemes) * prompts)
        reference = reference or answers
        ends = [divergence(answer, other) for answer, other in zip(answers, reference, strict=True)]
        rows.append(
            {
                "kv": scheme,
                "prompts": prompts,
                "prompt_tokens": prompt_tokens,
                "tokens": tokens,
                "divergence": ends,
                "median_divergence": statistics.median(ends),
                "mean_divergence": statistics.fmean(ends),
                "identical_percent": 100 * sum(end == tokens for end in ends) / prompts,
                "bits_per_value": loaded.layout.bits_per_value,
                **asdict(answerer.read),
                "quantization": loaded.metadata.quantization,
                "opt": opt,
                "chunk": chunk,
            }
        )
    return rows
