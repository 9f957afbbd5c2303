"""``kvq bench serve``: many clients against a server, over HTTP as its users do it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import numpy as np

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
    records : list of Record
        In the order of the requests.
    seconds : float
        From the first request to the last answer.
    peak_pages, total_pages : int or None
        Most pages that requests have held since the server started, of so many; None where it does not tell.
    """

    load: Load
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
            **asdict(self.load),
            "errors": len(self.records) - len(done),
            "seconds": self.seconds,
            "requests_per_second": len(done) / self.seconds,
            "prompt_tokens": prompt,
            "answer_tokens": answer,
            "answer_tokens_per_second": answer / self.seconds,
            "hit_rate": sum(record.cached_tokens for record in done) / prompt if prompt else 0.0,
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
    requests = make_requests(load)
    result = asyncio.run(_drive(url.rstrip("/").removesuffix("/v1"), load, requests, model, api_key, report))
    errors = [record.error for record in result.records if record.error is not None]
    if len(errors) == len(result.records):
        raise EngineError(f"every request failed: {errors[0]}")
    return result


async def _drive(
    url: str,
    load: Load,
    requests: Sequence[LoadRequest],
    model: str | None,
    api_key: str | None,
    report: Callable[[str], None] | None,
) -> ServeResult:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=load.clients + 2)
    records = [Record(request.shared) for request in requests]
    turn = iter(range(len(requests)))
    finished = 0

    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=None) as http:
        try:
            listed = (await http.get("/v1/models", timeout=10)).raise_for_status().json()
        except (httpx.HTTPError, ValueError) as problem:
            raise ConfigError(
                f"no OpenAI-compatible server at {url}: {problem or type(problem).__name__}"
            ) from None
        name = model or listed["data"][0]["id"]

        async def client() -> None:
            nonlocal finished
            for index in turn:
                try:
                    await _ask(http, name, requests[index], records[index])
                except (httpx.HTTPError, ValueError, KeyError) as problem:
                    records[index].error = str(problem) or type(problem).__name__
                finished += 1
                if report is not None:
                    report(f"{finished} of {len(requests)} requests")

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(load.clients)))
        seconds = time.perf_counter() - started
        peak_pages, total_pages = await _pages(http)
    return ServeResult(load, records, seconds, peak_pages, total_pages)


async def _ask(http: httpx.AsyncClient, model: str, request: LoadRequest, record: Record) -> None:
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
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            raise ValueError(f"status {response.status_code}: {response.text[:200]}")
        async for event in _events(response):
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


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[len("data: ") :])


async def _pages(http: httpx.AsyncClient) -> tuple[int | None, int | None]:
    """Most pages that requests have held since the server started, and how many there are."""
    try:
        stats = (await http.get("/stats")).raise_for_status().json()
        return stats["peak_pages"], stats["total_pages"]
    except (httpx.HTTPError, ValueError, KeyError):  # another server: it has no such page
        return None, None
