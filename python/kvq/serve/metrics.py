"""``/metrics`` for Prometheus: the engine's own figures, and times that the server sees."""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from kvq.engine.request import EngineStats
from kvq.serve.answering import Pieces

_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_NEXT_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)

#: Name, help, and field of the engine's figures.
_GAUGES = (
    ("kvq_requests_running", "Requests in the batch", "running"),
    ("kvq_requests_waiting", "Requests in the queue", "waiting"),
    ("kvq_requests_max_running", "Most requests in the batch", "max_running"),
    ("kvq_pages", "Sealed pages of the pool", "total_pages"),
    ("kvq_pages_used", "Pages that running requests hold", "used_pages"),
    ("kvq_pages_peak", "Most pages that running requests have held at once", "peak_pages"),
    ("kvq_pages_cached", "Pages that only the prefix cache holds", "cached_pages"),
)
_COUNTERS = (
    ("kvq_requests", "Requests taken", "requests"),
    ("kvq_requests_finished", "Requests that came to their end", "finished"),
    ("kvq_requests_cancelled", "Requests that their clients left", "cancelled"),
    ("kvq_requests_failed", "Requests that the engine ended with an error", "failed"),
    ("kvq_prompt_tokens", "Tokens of prompts that have started", "prompt_tokens"),
    ("kvq_prefix_hit_tokens", "Prompt tokens found in the prefix cache", "hit_tokens"),
    ("kvq_generated_tokens", "Tokens drawn", "generated_tokens"),
    ("kvq_prefill_rows", "Rows run for prompts", "prefill_rows"),
    ("kvq_decode_rows", "Rows run for answers", "decode_rows"),
    ("kvq_steps", "Steps of the model", "steps"),
    ("kvq_preemptions", "Requests that gave back their pages to run again later", "preemptions"),
    ("kvq_evicted_pages", "Pages that the prefix cache gave up", "evicted_pages"),
)


class _EngineFigures:
    """Reads the engine when Prometheus asks."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, key in _GAUGES:
            yield GaugeMetricFamily(name, text, value=getattr(stats, key))
        for name, text, key in _COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(stats, key))


class _Times:
    """A histogram of seconds. Prometheus' own takes locks, and every token of every answer is noted.

    Parameters
    ----------
    name, text : str
    bounds : tuple of float
        Upper bounds of the buckets, rising.
    """

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count a time. One event loop alone calls this."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class Metrics:
    """The figures of one server, in a registry of its own.

    Parameters
    ----------
    stats : callable
        The engine's figures at the moment.
    """

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineFigures(stats))
        self._first = _Times(
            "kvq_time_to_first_token_seconds", "From a request's arrival to its first token", _FIRST_TOKEN
        )
        self._next = _Times("kvq_inter_token_seconds", "From a token of an answer to the next", _NEXT_TOKEN)
        self.registry.register(self._first)
        self.registry.register(self._next)

    async def observe(self, source: Pieces) -> Pieces:
        """The same pieces, their times noted. Closing it closes their source."""
        started, last = time.perf_counter(), dict[int, float]()
        async with contextlib.aclosing(source) as batches:
            async for pieces in batches:
                now = time.perf_counter()
                for index, piece in pieces:
                    if piece.token is None:
                        continue
                    if index in last:
                        self._next.observe(now - last[index])
                    else:
                        self._first.observe(now - started)
                    last[index] = now
                yield pieces
