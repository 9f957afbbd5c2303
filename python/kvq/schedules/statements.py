"""Statements that a plain Python function can emit inside a kernel, whatever the device."""

from __future__ import annotations

from tvm.script import tirx as T


def put(buffer, value, *index):
    """Store ``value`` at ``index``."""
    T.buffer_store(buffer, value, list(index))


def run(start, lanes):
    """Index of ``lanes`` consecutive elements from ``start``."""
    return T.ramp(start, 1, lanes)


def when(condition, body):
    """Emit ``body()`` under a condition."""
    with T.If(condition), T.Then():
        body()


def for_threads(count: int, thread, threads: int, body):
    """Emit ``body(i)`` for every ``i`` below ``count`` (static), dealt to the threads of a block."""
    if count == threads:
        body(thread)
        return
    with T.serial(-(-count // threads)) as step:
        i = T.bind(step * threads + thread)
        if count % threads == 0:
            body(i)
        else:
            when(i < count, lambda: body(i))
