"""``kvq eval json``: structured answers, unconstrained, of a model that saw a few examples.

No grammar helps: a bracket or a key that a cache loses is lost.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kvq.compare import Comparison, Report
from kvq.errors import ConfigError, check_positive
from kvq.eval.answers import Answers
from kvq.eval.json_tasks import TaskSet, prompt, task_sets
from kvq.tokenizer import Tokenizer

Progress = Callable[[int, int], None]

#: Tasks that run at once.
BATCH = 16
#: Enough for the longest object; an answer ends with its line.
MAX_TOKENS = 80


def judge(answer: str, schema: dict[str, Any], expected: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Whether an answer is JSON, valid under a schema, and the object expected.

    Raises
    ------
    ConfigError
        If jsonschema is missing.
    """
    try:
        from jsonschema import Draft202012Validator
    except ImportError:
        raise ConfigError("kvq eval json needs jsonschema: install kvq[eval]") from None
    try:
        value = json.loads(answer, parse_constant=_refuse)
    except ValueError:
        return False, False, False
    return True, Draft202012Validator(schema).is_valid(value), value == expected


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def evaluate_structured(
    model: str,
    schemes: Sequence[str],
    *,
    quantization: str | None = None,
    opt: str = "O1",
    tasks: int = 64,
    examples: int = 8,
    seed: int = 0,
    chunk: int = 512,
    progress: Progress | None = None,
    report: Report | None = None,
) -> list[dict[str, Any]]:
    """Give every scheme the same tasks.

    Parameters
    ----------
    model, quantization, opt : str
        As :class:`kvq.compare.Comparison` takes them.
    schemes : sequence of str
        Cache schemes; the first is the reference of the others.
    tasks, examples : int
        Tasks in all, and worked examples before each.
    progress : callable, optional
        Called with (answers, answers to come).
    report : callable, optional
        Called with what is being prepared.

    Returns
    -------
    list of dict
        ``kv tasks examples json_percent valid_percent correct_percent same_percent`` (the reference's text)
        ``kinds`` (a dict each: ``kind tasks json valid correct same``) ``bits_per_value quantized_keys keys
        quantization opt chunk seed``; a dict a scheme.

    Raises
    ------
    KvqError
        If an argument or the model is unsuitable, or jsonschema is missing.
    """
    check_positive(tasks=tasks, examples=examples)
    judge("{}", {}, {})
    sets = task_sets(tasks, examples, seed)
    comparison = Comparison(model, quantization, schemes, opt, report)
    tokenizer = Tokenizer.from_dir(comparison.config_dir)
    begins = [tokenizer.encode(each.examples, add_special_tokens=True) for each in sets]
    prompts = [[tokenizer.encode(prompt(sentence)) for sentence in each.sentences] for each in sets]
    own = max(len(ids) for of_set in prompts for ids in of_set) + MAX_TOKENS
    models = comparison.load(max(map(len, begins)) + own, chunk, BATCH + 1, own)
    rows: list[dict[str, Any]] = []
    reference: list[list[str]] = []
    done = 0
    for scheme, loaded in zip(schemes, models, strict=True):
        answerer = Answers(loaded, chunk, tokenizer.vocab_size)
        told: list[list[str]] = []
        for begin, of_set in zip(begins, prompts, strict=True):
            answerer.begin(begin)
            ids = answerer.greedy(of_set, MAX_TOKENS, lambda tokens: "\n" in tokenizer.decode(tokens[-1:]))
            told.append([tokenizer.decode(tokens).split("\n")[0].strip() for tokens in ids])
            done += len(of_set)
            if progress is not None:
                progress(done, tasks * len(schemes))
        reference = reference or told
        rows.append(
            {
                "kv": scheme,
                "tasks": tasks,
                "examples": examples,
                **_tally(sets, told, reference),
                "bits_per_value": loaded.layout.bits_per_value,
                **asdict(answerer.read),
                "quantization": loaded.metadata.quantization,
                "opt": opt,
                "chunk": chunk,
                "seed": seed,
            }
        )
    return rows


def _tally(
    sets: Sequence[TaskSet], told: Sequence[Sequence[str]], reference: Sequence[Sequence[str]]
) -> dict[str, Any]:
    kinds = []
    total: Counter[str] = Counter()
    for each, answers, others in zip(sets, told, reference, strict=True):
        judged = [judge(a, each.kind.schema, e) for a, e in zip(answers, each.expected, strict=True)]
        counts = {
            "tasks": len(answers),
            "json": sum(json_ for json_, _, _ in judged),
            "valid": sum(valid for _, valid, _ in judged),
            "correct": sum(correct for _, _, correct in judged),
            "same": sum(a == b for a, b in zip(answers, others, strict=True)),
        }
        total.update(counts)
        kinds.append({"kind": each.kind.name, **counts})
    percents = {f"{name}_percent": 100 * total[name] / total["tasks"] for name in counts if name != "tasks"}
    return {**percents, "kinds": kinds}
