"""``AsyncEngine``: the core in a thread of its own, for servers and other users of asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator

from kvq.engine.core import Output
from kvq.engine.host import EngineHost
from kvq.engine.request import Piece, Request
from kvq.engine.setup import EngineParts
from kvq.errors import EngineError

logger = logging.getLogger("kvq")


class _Ticket:
    """A request on its way: the caller's queue, and the core's id once the thread has taken it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Piece] = asyncio.Queue()
        self.index: int | None = None
        self.cancelled = False


class AsyncEngine(EngineHost):
    """A model ready to answer asyncio's tasks; parameters are those of :class:`EngineHost`.

    ``generate`` may be called in any number of tasks and event loops at once. The thread ends with
    :meth:`shutdown`; it does not keep the process alive.
    """

    def _start(self, parts: EngineParts) -> None:
        super()._start(parts)
        self._changed = threading.Condition()
        self._new: deque[_Ticket] = deque()
        self._cancelled: deque[_Ticket] = deque()
        self._reset = False
        self._tickets: dict[int, _Ticket] = {}
        self._closing = self._aborting = False
        self._aborted = 0
        self._thread = threading.Thread(target=self._run, name="kvq-engine", daemon=True)
        self._thread.start()

    async def generate(self, request: Request) -> AsyncGenerator[Piece, None]:
        """Pieces of an answer; the last one has a finish reason.

        Closing the iterator, or cancelling the task, cancels the request; its pages are free before the next
        step. Pieces wait for a slow reader, the engine does not: it finishes the answer and frees the pages.

        Raises
        ------
        ConfigError
            If the request can never run (:meth:`check` tells beforehand).
        EngineError
            If the engine is shut down.
        """
        self.check(request)
        ticket = _Ticket(request)
        with self._changed:
            if self._closing:
                raise EngineError("the engine is shutting down: it takes no more requests")
            self._new.append(ticket)
            self._changed.notify()
        finished = False
        try:
            while not finished:
                piece = await ticket.queue.get()
                finished = piece.finish_reason is not None
                yield piece
        finally:
            if not finished:
                with self._changed:
                    ticket.cancelled = True
                    self._cancelled.append(ticket)
                    self._changed.notify()

    def reset(self) -> None:
        """Empty the prefix cache, before the next step."""
        with self._changed:
            self._reset = True
            self._changed.notify()

    def shutdown(self, drain_seconds: float = 0.0) -> int:
        """Take no more requests, let those that run finish for so long, abort the rest, end the thread.

        Returns
        -------
        int
            Requests that were aborted; each got a last piece with the reason ``abort``.
        """
        deadline = time.monotonic() + drain_seconds
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            self._aborting = True
            self._changed.notify()
        self._thread.join()
        return self._aborted

    # ---- the thread ----------------------------------------------------------------------------
    def _run(self) -> None:
        core = self._core
        while True:
            with self._changed:
                while not (self._new or self._cancelled or self._reset or self._closing or core.has_work):
                    self._changed.wait()
                new, cancelled = list(self._new), list(self._cancelled)
                self._new.clear()
                self._cancelled.clear()
                reset, self._reset = self._reset, False
                closing, aborting = self._closing, self._aborting
            for ticket in new:
                if not ticket.cancelled:
                    ticket.index = core.add(ticket.request)
                    self._tickets[ticket.index] = ticket
            for ticket in cancelled:
                if ticket.index is not None and self._tickets.pop(ticket.index, None) is not None:
                    core.cancel(ticket.index)
            if reset:
                core.reset()
            if aborting:
                outputs = core.abort_all("the engine is shutting down")
                self._aborted = len(outputs)
                self._deliver(outputs)
            if closing and not core.has_work:
                return
            self._deliver(core.step())

    def _deliver(self, outputs: list[Output]) -> None:
        """Hand pieces to the event loops of their readers, once a loop and step."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Ticket, Piece]]] = {}
        for index, piece in outputs:
            ticket = self._tickets[index]
            if piece.finish_reason is not None:
                del self._tickets[index]
            by_loop.setdefault(ticket.loop, []).append((ticket, piece))
        for loop, pieces in by_loop.items():
            # A loop that is closed has no readers left.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_put_all, pieces)


def _put_all(pieces: list[tuple[_Ticket, Piece]]) -> None:
    for ticket, piece in pieces:
        ticket.queue.put_nowait(piece)
