"""``kvq bench serve``: many clients against a server, over HTTP as its users do it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import numpy as np

from kvq.bench.event_stream import StreamError, post_events
from kvq.bench.serve_load import Load, LoadRequest, make_requests
from kvq.errors import ConfigError, EngineError

_PERCENTILES = (50, 95, 99)


@dataclass
class Record:
    """What became of a request; seconds."""

    shared: bool
    first_token: float = float("nan")
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class ServeResult:
    """A load that was run.

    Attributes
    ----------
    url : str
        The server's address.
    records : list of Record
        In the order of the requests.
    seconds : float
        From the first request to the last answer.
    peak_pages, total_pages : int or None
        Most pages that requests have held since the server started, of so many; None where it does not tell.
    """

    load: Load
    url: str
    records: list[Record]
    seconds: float
    peak_pages: int | None
    total_pages: int | None

    def to_dict(self) -> dict[str, Any]:
        """Figures for a table or for JSON: counts, rates per second, and seconds at percentiles."""
        done = [record for record in self.records if record.error is None]
        prompt = sum(record.prompt_tokens for record in done)
        answer = sum(record.answer_tokens for record in done)
        out: dict[str, Any] = {
            "url": self.url,
            **asdict(self.load),
            "errors": len(self.records) - len(done),
            "seconds": self.seconds,
            "requests_per_second": len(done) / self.seconds,
            "prompt_tokens": prompt,
            "answer_tokens": answer,
            "answer_tokens_per_second": answer / self.seconds,
            "hit_rate": sum(record.cached_tokens for record in done) / prompt if prompt else None,
            "peak_pages": self.peak_pages,
            "total_pages": self.total_pages,
        }
        for name, values in (
            ("first_token", [record.first_token for record in done]),
            ("first_token_shared", [record.first_token for record in done if record.shared]),
            ("first_token_unshared", [record.first_token for record in done if not record.shared]),
            ("inter_token", [gap for record in done for gap in record.gaps]),
        ):
            for percent in _PERCENTILES:
                value = float(np.percentile(values, percent)) if values else None
                out[f"{name}_p{percent}"] = value
        return out


def bench_serve(
    url: str,
    load: Load,
    *,
    model: str | None = None,
    api_key: str | None = None,
    report: Callable[[str], None] | None = None,
) -> ServeResult:
    """Drive a server with a load.

    Parameters
    ----------
    url : str
        Its address, without ``/v1``.
    model : str, optional
        The name to ask for; the first one that it lists by default.
    api_key : str, optional
    report : callable, optional
        Told in words how far it is.

    Raises
    ------
    ConfigError
        If there is no such server.
    EngineError
        If every request failed.
    """
    url = _base(url)
    result = asyncio.run(_drive(url, load, make_requests(load), model, api_key, report))
    errors = [record.error for record in result.records if record.error is not None]
    if len(errors) == len(result.records):
        raise EngineError(f"{url}: every request failed: {errors[0]}")
    return result


def check_server(url: str, api_key: str | None = None) -> None:
    """Refuse an address without a server before others are measured; raises ConfigError."""

    async def look() -> None:
        async with _client(_base(url), api_key) as http:
            await _first_model(http)

    asyncio.run(look())


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _client(url: str, api_key: str | None) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, headers=_headers(api_key), timeout=10)


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def _first_model(http: httpx.AsyncClient) -> str:
    try:
        listed = (await http.get("/v1/models")).raise_for_status().json()
        return str(listed["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as problem:
        raise ConfigError(
            f"no OpenAI-compatible server at {http.base_url}: {problem or type(problem).__name__}"
        ) from None


async def _drive(
    url: str,
    load: Load,
    requests: Sequence[LoadRequest],
    model: str | None,
    api_key: str | None,
    report: Callable[[str], None] | None,
) -> ServeResult:
    records = [Record(request.shared) for request in requests]
    turn = iter(range(len(requests)))
    finished = 0

    async with _client(url, api_key) as http:
        name = model or await _first_model(http)

        async def client() -> None:
            nonlocal finished
            for index in turn:
                try:
                    await _ask(url, _headers(api_key), name, requests[index], records[index])
                except (StreamError, ValueError, KeyError, TypeError) as problem:
                    records[index].error = str(problem) or type(problem).__name__
                finished += 1
                if report is not None:
                    report(f"{finished} of {len(requests)} requests")

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(load.clients)))
        seconds = time.perf_counter() - started
        peak_pages, total_pages = await _pages(http)
    return ServeResult(load, url, records, seconds, peak_pages, total_pages)


async def _ask(url: str, headers: dict[str, str], model: str, request: LoadRequest, record: Record) -> None:
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    last = started = time.perf_counter()
    async with contextlib.aclosing(post_events(f"{url}/v1/completions", body, headers)) as events:
        async for event in events:
            if "error" in event:
                raise ValueError(event["error"]["message"])
            now = time.perf_counter()
            if event.get("usage"):
                usage = event["usage"]
                record.prompt_tokens, record.answer_tokens = (
                    usage["prompt_tokens"],
                    usage["completion_tokens"],
                )
                record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            if not event["choices"]:
                continue
            if record.first_token != record.first_token:
                record.first_token = now - started
            else:
                record.gaps.append(now - last)
            last = now
    if record.first_token != record.first_token:
        raise ValueError("the answer ended before its first token")
    if not record.answer_tokens:  # a server that does not count: a part is a token
        record.answer_tokens = 1 + len(record.gaps)


async def _pages(http: httpx.AsyncClient) -> tuple[int | None, int | None]:
    """Most pages that requests have held since the server started, and how many there are."""
    try:
        stats = (await http.get("/stats")).raise_for_status().json()
        return stats["peak_pages"], stats["total_pages"]
    except (httpx.HTTPError, ValueError, KeyError):  # another server: it has no such page
        return None, None
