"""Finds stop strings in text that arrives in pieces, and never lets a part of one out."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Holds back the end of the text for as long as it may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def put(self, text: str) -> str:
        """Take a piece; return what may be shown. After a match, ``stopped`` is set."""
        if not self._stops or self.stopped:
            return "" if self.stopped else text
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        hold = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """The text ends: what was held back was no stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that begins ``marker``, the whole of it apart."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
