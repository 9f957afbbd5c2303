"""Server-sent events of an HTTP request, at a cost that lets one process read thousands a second.

A client must not be what a benchmark of a server measures, and general HTTP clients take longer for an event
than the server does. Only the bytes of the protocol are left to a library (``httptools``).
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Mapping
from typing import Any
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

#: Bytes that are read at once, and of an answer that is no stream of events.
_READ, _MOST_ERROR = 1 << 16, 1 << 20


class StreamError(Exception):
    """The request had no stream of events for an answer, or the stream broke off; one line."""


class _Response:
    """What the parser has found."""

    def __init__(self) -> None:
        self.parser = HttpResponseParser(self)
        self.body = b""
        self.is_stream = self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self.is_stream = value.startswith(b"text/event-stream")

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True

    def events(self) -> list[bytes]:
        """The data of the events that are there whole; a comment has none."""
        *whole, self.body = self.body.replace(b"\r\n", b"\n").split(b"\n\n")
        return [event[5:].strip() for event in whole if event.startswith(b"data:")]


async def post_events(
    url: str, body: Any, headers: Mapping[str, str] | None = None
) -> AsyncGenerator[dict[str, Any], None]:
    """Ask for a stream of server-sent events that are JSON objects, up to ``[DONE]``; closing it hangs up.

    Parameters
    ----------
    url : str
        ``http`` or ``https``.
    body
        Sent as JSON.

    Raises
    ------
    StreamError
        If the server cannot be reached, does not answer with such a stream, or breaks it off.
    """
    address = urlsplit(url)
    content = json.dumps(body).encode()
    head = {
        "Host": address.netloc.rpartition("@")[2],
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        "Connection": "close",
        **(headers or {}),
    }
    lines = [f"POST {address.path or '/'} HTTP/1.1", *(f"{name}: {text}" for name, text in head.items())]
    secure = ssl.create_default_context() if address.scheme == "https" else None
    response, writer = _Response(), None
    try:
        port = address.port or (443 if secure else 80)
        reader, writer = await asyncio.open_connection(address.hostname, port, ssl=secure)
        writer.write("\r\n".join([*lines, "", ""]).encode() + content)
        while not response.complete and (data := await reader.read(_READ)):
            response.parser.feed_data(data)
            if response.is_stream:
                for event in response.events():
                    if event == b"[DONE]":
                        return
                    yield json.loads(event)
            elif len(response.body) > _MOST_ERROR:
                break
    except (OSError, HttpParserError, json.JSONDecodeError) as problem:
        raise StreamError(f"{type(problem).__name__}: {problem}") from None
    finally:
        if writer is not None:
            writer.close()
    if response.is_stream or not response.complete:
        raise StreamError("the answer ended too early")
    text = " ".join(response.body.decode(errors="replace").split())
    raise StreamError(f"status {response.parser.get_status_code()}: {text[:200]}")
