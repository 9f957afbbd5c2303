"""The client of ``kvq bench serve`` against servers that send what others do."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from kvq.bench.event_stream import StreamError, post_events
from kvq.bench.serve import bench_serve
from kvq.bench.serve_load import Load

STREAM = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"


def chunked(*bodies: str) -> str:
    return "transfer-encoding: chunked\r\n\r\n" + "".join(f"{len(b.encode()):x}\r\n{b}\r\n" for b in bodies)


def ask(answer: str, cut: int = 7, most: int = 99) -> list[dict[str, Any]]:
    """Events of a server that sends these bytes, a few at a time, and closes."""
    found: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        data = answer.encode()
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(data), cut):
                writer.write(data[at : at + cut])
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions"
        async with server, contextlib.aclosing(post_events(url, {"prompt": "é"})) as events:
            async for event in events:
                found.append(event)
                if len(found) == most:
                    break

    asyncio.run(asyncio.wait_for(main(), 20))
    return found


@pytest.mark.parametrize("cut", [1, 7, 10_000])
@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
def test_events_come_however_they_are_cut(cut: int, end: str) -> None:
    bodies = [f'data: {{"a": "é\\n"}}{end}: a comment{end}da', f'ta:{{"b": 2}}{end}data: [DONE]{end}']
    expected = [{"a": "é\n"}, {"b": 2}]
    assert ask(STREAM + chunked(*bodies, ""), cut) == expected
    assert ask(STREAM + "\r\n" + "".join(bodies), cut) == expected, "without a length: until the end"
    assert ask(STREAM + chunked(*bodies, ""), cut, most=1) == expected[:1], "the reader hangs up"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("HTTP/1.1 404 No\r\ncontent-length: 14\r\n\r\n{'a':\n 'none'}", "status 404: {'a': 'none'}"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "status 200: {}"),
        (STREAM + chunked('data: {"a": 1}\n\n', ""), "ended too early"),
        (STREAM + chunked('data: {"a": 1}\n\n'), "ended too early"),
        (STREAM + chunked("data: {\n\n"), "JSONDecodeError"),
        ("SSH-2.0-OpenSSH\r\n\r\n", "HttpParser"),
        ("", "ended too early"),
    ],
)
def test_what_is_no_stream_is_said(answer: str, said: str) -> None:
    with pytest.raises(StreamError) as error:
        ask(answer)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_nobody_there() -> None:
    async def main() -> None:
        async for _ in post_events("http://127.0.0.1:9/x", {}):
            raise AssertionError

    with pytest.raises(StreamError, match="ConnectionRefusedError"):
        asyncio.run(main())


def test_a_server_that_counts_nothing_is_counted_by_parts() -> None:
    part = 'data: {"choices": [{"index": 0, "text": "x"}]}\n\n'
    models = '{"data": [{"id": "theirs"}]}'

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST"):
            writer.write((STREAM + chunked(part * 3, "data: [DONE]\n\n", "")).encode())
        else:
            status = "200 OK" if b"/v1/models" in head else "404 No"
            writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(models)}\r\n\r\n{models}".encode())
        await writer.drain()
        writer.close()

    async def main() -> dict[str, Any]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/"
        async with server:
            result = await asyncio.to_thread(bench_serve, url, Load(requests=3, clients=2))
        return result.to_dict()

    figures = asyncio.run(main())
    assert figures["answer_tokens"] == 9 and figures["errors"] == 0
    assert figures["hit_rate"] is figures["peak_pages"] is None
