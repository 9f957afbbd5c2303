"""``kvq eval retrieval``: does a model still find what it read, through each cache?

A haystack is read once; every question on it is a fork that ends where the answer begins, and counts as found
when greedy decoding says the answer and nothing else. All schemes get the same haystacks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvq.compare import Comparison, Report
from kvq.errors import ConfigError, check_positive
from kvq.eval.answers import Answers, KeysRead
from kvq.eval.haystacks import DEFAULT_DEPTHS, TASKS, Haystack, haystacks
from kvq.eval.text import DEFAULT_TEXT, read_text
from kvq.tokenizer import Tokenizer

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Row:
    """Result of one task under one scheme.

    Attributes
    ----------
    task, kv : str
    trials, hits, percent
        Questions, those answered, and these in percent.
    delta_points, delta_stderr : float
        Difference to the reference in points, and its standard error over haystacks, since the questions on
        one are not independent; None where there is only one haystack.
    lost, gained : int
        Questions that only the reference, or only this scheme, answers.
    p_value : float
        Two-sided exact McNemar test of lost against gained.
    cells : list of dict
        ``length depth trials hits``.
    """

    task: str
    kv: str
    trials: int
    hits: int
    percent: float
    delta_points: float
    delta_stderr: float | None
    lost: int
    gained: int
    p_value: float
    cells: list[dict[str, int]]


def mcnemar(lost: int, gained: int) -> float:
    """Two-sided exact probability of so uneven a split of ``lost + gained`` if either were as likely."""
    total = lost + gained
    tail = sum(math.comb(total, i) for i in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / 2**total)


def paired_difference(
    found: Sequence[Sequence[bool]], reference: Sequence[Sequence[bool]]
) -> tuple[float, float | None]:
    """Difference of the hit rates in points, and its standard error with haystacks as clusters.

    Parameters
    ----------
    found, reference : sequence of sequence of bool
        The questions of each haystack.
    """
    gains = np.array([sum(f) - sum(r) for f, r in zip(found, reference, strict=True)], np.float64)
    sizes = np.array([len(f) for f in found], np.float64)
    mean = float(gains.sum() / sizes.sum())
    count = len(gains)
    if count < 2:
        return 100 * mean, None
    residuals = gains - mean * sizes
    stderr = math.sqrt(float((residuals**2).sum()) * count / (count - 1)) / float(sizes.sum())
    return 100 * mean, 100 * stderr


def evaluate_retrieval(
    model: str,
    schemes: Sequence[str],
    text: str = DEFAULT_TEXT,
    *,
    quantization: str | None = None,
    opt: str = "O1",
    tasks: Sequence[str] = ("needle", "kv"),
    lengths: Sequence[int] = (512, 1024),
    depths: Sequence[int] = DEFAULT_DEPTHS,
    trials: int = 100,
    seed: int = 0,
    chunk: int = 512,
    progress: Progress | None = None,
    report: Report | None = None,
) -> list[dict[str, Any]]:
    """Ask every scheme the same questions.

    Parameters
    ----------
    model, quantization, opt : str
        As :class:`kvq.compare.Comparison` takes them.
    schemes : sequence of str
        Cache schemes; the first is the reference of the others.
    text : str
        The prose around the facts: a file, or the name of a text that ships with kvq.
    tasks : sequence of str
        Keys of :data:`TASKS`.
    lengths : sequence of int
        Tokens of a haystack.
    depths : sequence of int
        Where the facts of a haystack stand, in percent.
    trials : int
        Questions of each task and length.
    progress : callable, optional
        Called with (answers, answers to come).
    report : callable, optional
        Called with what is being prepared.

    Returns
    -------
    list of dict
        The fields of :class:`Row`, ``bits_per_value``, ``quantized_keys`` of ``keys`` that the answers'
        tokens attended to, ``quantization``, ``opt``, ``chunk`` and ``seed``; a dict a task and scheme.

    Raises
    ------
    KvqError
        If an argument, the text or the model is unsuitable.
    """
    _check(tasks, depths, trials)
    content = read_text(text)
    comparison = Comparison(model, quantization, schemes, opt, report)
    tokenizer = Tokenizer.from_dir(comparison.config_dir)
    prose = tokenizer.encode(content)
    begin = tokenizer.encode("", add_special_tokens=True)
    hidden = [
        haystack
        for task in tasks
        for length in lengths
        for haystack in haystacks(tokenizer.encode, prose, task, length - len(begin), depths, trials, seed)
    ]
    longest = max(len(q.prompt) + len(q.answer) for haystack in hidden for q in haystack.questions)
    models = comparison.load(max(lengths) + longest, chunk, len(depths) + 1, longest)
    answerers = [Answers(loaded, chunk, tokenizer.vocab_size) for loaded in models]
    found: list[list[list[bool]]] = [[] for _ in schemes]
    reads = {task: [KeysRead() for _ in schemes] for task in tasks}
    total = len(schemes) * trials * len(tasks) * len(lengths)
    for haystack in hidden:
        prompts = [question.prompt for question in haystack.questions]
        wanted = [question.answer for question in haystack.questions]
        for index, answerer in enumerate(answerers):
            answerer.begin([*begin, *haystack.ids])
            answerer.read = reads[haystack.task][index]
            found[index].append(answerer.follows(prompts, wanted))
            if progress is not None:
                progress(sum(len(each) for one in found for each in one), total)
    made = {"quantization": models[0].metadata.quantization, "opt": opt, "chunk": chunk, "seed": seed}
    return [
        {
            **asdict(_row(task, scheme, hidden, found[index], found[0])),
            "bits_per_value": models[index].layout.bits_per_value,
            **asdict(reads[task][index]),
            **made,
        }
        for task in tasks
        for index, scheme in enumerate(schemes)
    ]


def _check(tasks: Sequence[str], depths: Sequence[int], trials: int) -> None:
    for task in tasks:
        if task not in TASKS:
            raise ConfigError(f"--task {task}: unknown: use {', or '.join(TASKS)}")
    most = min(len(TASKS[task]) for task in tasks)
    if (
        not 1 <= len(depths) <= most
        or len(set(depths)) < len(depths)
        or not all(0 <= d <= 100 for d in depths)
    ):
        raise ConfigError(f"--depths: need 1 to {most} different percentages between 0 and 100")
    check_positive(trials=trials)


def _row(
    task: str,
    scheme: str,
    hidden: Sequence[Haystack],
    found: Sequence[list[bool]],
    reference: Sequence[list[bool]],
) -> Row:
    own = [i for i, haystack in enumerate(hidden) if haystack.task == task]
    pairs = [pair for i in own for pair in zip(found[i], reference[i], strict=True)]
    trials: Counter[tuple[int, int]] = Counter()
    hits: Counter[tuple[int, int]] = Counter()
    for i in own:
        for question, hit in zip(hidden[i].questions, found[i], strict=True):
            trials[hidden[i].length, question.depth] += 1
            hits[hidden[i].length, question.depth] += hit
    delta, stderr = paired_difference([found[i] for i in own], [reference[i] for i in own])
    lost = sum(before and not now for now, before in pairs)
    gained = sum(now and not before for now, before in pairs)
    return Row(
        task=task,
        kv=scheme,
        trials=len(pairs),
        hits=sum(now for now, _ in pairs),
        percent=100 * sum(now for now, _ in pairs) / len(pairs),
        delta_points=delta,
        delta_stderr=stderr,
        lost=lost,
        gained=gained,
        p_value=mcnemar(lost, gained),
        cells=[
            {"length": length, "depth": depth, "trials": count, "hits": hits[length, depth]}
            for (length, depth), count in sorted(trials.items())
        ],
    )
