"""Rounds that take turns: every scheme is measured under the same weather."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Rate:
    """Speed of one scheme; the fields are keys of ``--json``.

    ``tokens_per_second`` is the median of the rounds, ``slowest`` and ``fastest`` their extremes;
    ``ratio`` is the median, over the rounds, of the speed against the first scheme's in the same round.
    """

    kv: str
    tokens_per_second: float
    slowest: float
    fastest: float
    ratio: float
    rounds: int

    def to_dict(self) -> dict[str, float | int | str]:
        """A JSON-ready description."""
        return asdict(self)


def take_turns(
    names: Sequence[str],
    work: Sequence[Callable[[], float]],
    tokens: int,
    rounds: int,
    progress: Callable[[], None] | None = None,
) -> list[Rate]:
    """Measure several schemes in interleaved rounds, after one that does not count.

    Parameters
    ----------
    names : sequence of str
        The schemes; the first is the one that ratios refer to.
    work : sequence of callable
        Each does a scheme's share of a round and returns the seconds it took.
    tokens : int
        Tokens of such a share.
    rounds : int
        At least 1. Every other round runs in reverse order, so that nobody always follows the same scheme.
    progress : callable, optional
        Called after each share of a round.
    """
    rates: list[list[float]] = [[] for _ in work]
    for index in range(rounds + 1):
        order = range(len(work)) if index % 2 == 0 else reversed(range(len(work)))
        for i in order:
            seconds = work[i]()
            if index:
                rates[i].append(tokens / seconds)
            if progress is not None:
                progress()
    return [
        Rate(
            kv=name,
            tokens_per_second=statistics.median(own),
            slowest=min(own),
            fastest=max(own),
            ratio=statistics.median(mine / first for mine, first in zip(own, rates[0], strict=True)),
            rounds=rounds,
        )
        for name, own in zip(names, rates, strict=True)
    ]


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
