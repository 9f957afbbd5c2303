"""Runs requests for callers that wait: whoever waits for a piece steps the core, for all of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence

from kvq.engine.core import EngineCore
from kvq.engine.request import EngineStats, Piece, Request


class Driver:
    """Shares a core among threads. There is no thread of its own: nothing runs unless somebody waits.

    Parameters
    ----------
    core : EngineCore
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._lock = threading.Lock()
        self._pieces: dict[int, deque[Piece]] = {}

    def check(self, request: Request) -> None:
        """Refuse what can never run; raises ConfigError."""
        self.core.check(request)

    def run(self, requests: Sequence[Request]) -> Generator[tuple[int, Piece], None, None]:
        """Run requests at once: the index of a request and its next piece, in the order of the steps.

        The last piece of each has a finish reason. Closing the iterator cancels what still runs and frees
        its pages at once.
        """
        index_of: dict[int, int] = {}
        try:
            with self._lock:
                for index, request in enumerate(requests):
                    index_of[self.core.add(request)] = index
                self._pieces.update((identity, deque()) for identity in index_of)
            while index_of:
                with self._lock:
                    ready = self._take(list(index_of))
                    if not ready:
                        self._step()
                        ready = self._take(list(index_of))
                for identity, piece in ready:
                    index = index_of[identity]
                    if piece.finish_reason is not None:
                        del index_of[identity]
                    yield index, piece
        finally:
            with self._lock:
                for identity in index_of:
                    self.core.cancel(identity)
                    self._pieces.pop(identity, None)

    def stats(self) -> EngineStats:
        """The engine at this moment."""
        return self.core.stats()

    def reset(self) -> None:
        """Empty the prefix cache; requests that run keep their pages."""
        with self._lock:
            self.core.reset()

    def _take(self, identities: list[int]) -> list[tuple[int, Piece]]:
        """Pieces that wait for these requests, in turn."""
        ready = []
        for identity in identities:
            queue = self._pieces[identity]
            while queue:
                piece = queue.popleft()
                ready.append((identity, piece))
                if piece.finish_reason is not None:
                    del self._pieces[identity]
        return ready

    def _step(self) -> None:
        try:
            outputs = self.core.step()
        except BaseException:
            # An interrupt of this thread ended requests that other threads wait for.
            for identity, queue in self._pieces.items():
                if identity not in self.core:
                    queue.append(Piece(None, "", "error", "the step was interrupted"))
            raise
        for identity, piece in outputs:
            self._pieces[identity].append(piece)
