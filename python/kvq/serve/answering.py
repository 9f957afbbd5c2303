"""Runs the requests of an answer in the event loop: to the end, or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvq.engine.answers import Answer, Part, Whole
from kvq.engine.request import Piece
from kvq.errors import KvqError
from kvq.serve.errors import error_content, status_of

logger = logging.getLogger("kvq")

#: Pieces of an answer's requests as they come, all that wait at once. Closing it cancels the requests.
Pieces = AsyncGenerator[list[tuple[int, Piece]], None]

_Result = TypeVar("_Result")

#: JSON lets these stand in a string; clients that split text into lines would break the event there.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


async def collect(source: Pieces, answer: Answer[Whole, Part]) -> Whole:
    """The whole answer.

    Raises
    ------
    EngineError
        If the engine had to end one of its choices; the others are cancelled.
    """
    async with contextlib.aclosing(source) as batches:
        async for pieces in batches:
            for index, piece in pieces:
                answer.feed(index, piece)
    return answer.whole()


async def events(
    source: Pieces, answer: Answer[Whole, Part], include_usage: bool
) -> AsyncGenerator[str, None]:
    """The answer as server-sent events, those that are ready at once in one text.

    What goes wrong on the way is an event too: the status is sent.
    """
    ready: list[str] = []
    try:
        async with contextlib.aclosing(source) as batches:
            async for pieces in batches:
                for index, piece in pieces:
                    part = answer.feed_json(index, piece)
                    if part is not None:
                        ready.append(_event(part))
                if ready:
                    yield "".join(ready)
                    ready.clear()
        if include_usage:
            ready.append(_event(answer.usage_part().model_dump_json()))
    except KvqError as error:
        ready.append(_event(json.dumps(error_content(status_of(error), str(error)))))
    except Exception:
        logger.exception("a stream failed")
        ready.append(_event(json.dumps(error_content(500, "the server failed; its log says why"))))
    ready.append(_event("[DONE]"))
    yield "".join(ready)


def _event(data: str) -> str:
    if not data.isascii():
        data = data.translate(_LINE_ENDS)
    return f"data: {data}\n\n"


class EventStream(StreamingResponse):
    """Server-sent events whose source is closed at once when the client goes."""

    def __init__(self, source: AsyncGenerator[str, None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(source, media_type="text/event-stream", headers=headers)
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()


async def until_gone(http: HttpRequest, work: Awaitable[_Result]) -> _Result | None:
    """The result of work that is cancelled when the client goes; None if it went."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(http: HttpRequest) -> None:
    while True:
        message: Any = await http.receive()
        if message["type"] == "http.disconnect":
            return
