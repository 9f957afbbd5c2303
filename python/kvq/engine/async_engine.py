"""``AsyncEngine``: the core in a thread of its own, for servers and other users of asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence

from kvq.engine.core import Output
from kvq.engine.host import EngineHost
from kvq.engine.request import Piece, Request
from kvq.engine.setup import EngineParts
from kvq.errors import EngineError

logger = logging.getLogger("kvq")


class _Mailbox:
    """Pieces on their way to one reader; all but the making of it belongs to the reader's event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._pieces: list[tuple[int, Piece]] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, index: int, piece: Piece) -> None:
        """Add a piece of the reader's request ``index``."""
        self._pieces.append((index, piece))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[tuple[int, Piece]]:
        """All that is there, at least one piece."""
        while not self._pieces:
            self._waiter = self.loop.create_future()
            await self._waiter
        pieces, self._pieces = self._pieces, []
        return pieces


class _Ticket:
    """A request on its way: where its pieces go, and the core's id once the thread has taken it."""

    def __init__(self, request: Request, number: int, mailbox: _Mailbox) -> None:
        self.request, self.number, self.mailbox = request, number, mailbox
        self.index: int | None = None
        self.cancelled = False


class AsyncEngine(EngineHost):
    """A model ready to answer asyncio's tasks; parameters are those of :class:`EngineHost`.

    Any number of tasks and event loops may use it at once. The thread ends with :meth:`shutdown`; it does
    not keep the process alive. What a step brought is handed out while the device computes the next one.
    """

    def _start(self, parts: EngineParts) -> None:
        super()._start(parts)
        self._changed = threading.Condition()
        self._new: deque[_Ticket] = deque()
        self._cancelled: deque[_Ticket] = deque()
        self._reset = False
        self._tickets: dict[int, _Ticket] = {}
        self._outputs: list[Output] = []
        self._closing = self._aborting = False
        self._aborted = 0
        self._thread = threading.Thread(target=self._run, name="kvq-engine", daemon=True)
        self._thread.start()

    async def run(self, requests: Sequence[Request]) -> AsyncGenerator[list[tuple[int, Piece]], None]:
        """Run requests at once: the index of a request and its piece, all that have come since the last time.

        The last piece of each has a finish reason. Closing the iterator, or cancelling the task, cancels what
        still runs; its pages are free before the next step. Pieces wait for a slow reader, the engine does
        not: it finishes the answers and frees the pages.

        Raises
        ------
        ConfigError
            If a request can never run (:meth:`check` tells beforehand).
        EngineError
            If the engine is shut down.
        """
        for request in requests:
            self.check(request)
        mailbox = _Mailbox()
        tickets = [_Ticket(request, number, mailbox) for number, request in enumerate(requests)]
        with self._changed:
            if self._closing:
                raise EngineError("the engine is shutting down: it takes no more requests")
            self._new.extend(tickets)
            self._changed.notify()
        running = len(tickets)
        try:
            while running:
                pieces = await mailbox.take()
                running -= sum(piece.finish_reason is not None for _, piece in pieces)
                yield pieces
        finally:
            if running:
                with self._changed:
                    for ticket in tickets:
                        ticket.cancelled = True
                    self._cancelled.extend(tickets)
                    self._changed.notify()

    async def generate(self, request: Request) -> AsyncGenerator[Piece, None]:
        """Pieces of one answer, as of :meth:`run`."""
        async with contextlib.aclosing(self.run([request])) as batches:
            async for pieces in batches:
                for _, piece in pieces:
                    yield piece

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
                aborted = core.abort_all("the engine is shutting down")
                self._aborted = len(aborted)
                self._outputs += aborted
            if core.has_work:
                outputs = core.step(self._deliver)
                self._deliver()  # a step that did not get to run called nobody
                self._outputs = outputs
            if not core.has_work:
                self._deliver()
                if closing:
                    return

    def _deliver(self) -> None:
        """Hand the pieces that wait to the event loops of their readers, once a loop."""
        outputs, self._outputs = self._outputs, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Ticket, Piece]]] = {}
        for index, piece in outputs:
            ticket = self._tickets.get(index)
            if ticket is None:  # cancelled since
                continue
            if piece.finish_reason is not None:
                del self._tickets[index]
            by_loop.setdefault(ticket.mailbox.loop, []).append((ticket, piece))
        for loop, pieces in by_loop.items():
            # A loop that is closed has no readers left.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_put_all, pieces)


def _put_all(pieces: list[tuple[_Ticket, Piece]]) -> None:
    for ticket, piece in pieces:
        ticket.mailbox.put(ticket.number, piece)
