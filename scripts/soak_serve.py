"""A server under mixed load for minutes: does anything fail, leak, or grow?

    python scripts/soak_serve.py MODEL --device cuda --model-lib LIBRARY.so --memory 6GB --seconds 570

Starts ``kvq serve`` and keeps clients busy: prompts and answers of many lengths, half of the prompts with a
shared prefix; greedy and drawn; streamed and whole; every seventh hangs up in the middle, some ask for log
probabilities, some for JSON. The memory that the driver counts for the server's process and the server's
figures are read every few seconds. Prints JSON; fails if a request failed, if pages are left when all is
over, or if memory grew after the first quarter.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import numpy as np

from kvq.bench.event_stream import post_events
from kvq.bench.serve_load import Load, LoadRequest, make_requests
from kvq.errors import LibraryError
from kvq.runtime.gpu_memory import GpuMemory

#: Seconds between two readings, and bytes that memory may grow after the first quarter.
READ_EVERY, MAY_GROW = 5, 32 << 20


class Soak:
    """The clients and what they saw."""

    def __init__(self, url: str, http: httpx.AsyncClient, model: str, until: float) -> None:
        self.url, self.http, self.model, self.until = url, http, model, until
        self.done: Counter[str] = Counter()
        self.errors: list[str] = []
        self.tokens = 0
        self.first_token: list[float] = []

    async def client(self, requests: itertools.cycle[LoadRequest], numbers: itertools.count[int]) -> None:
        """Ask until the time is up."""
        while time.monotonic() < self.until:
            number = next(numbers)
            try:
                await self.ask(number, next(requests))
            except Exception as error:
                self.errors.append(f"request {number}: {type(error).__name__}: {error}"[:300])

    async def ask(self, number: int, request: LoadRequest) -> None:
        """One request, of the kind that its number says."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "seed": number,
            "temperature": 0 if number % 3 == 0 else 0.8,
            "top_p": 0.9 if number % 3 == 1 else 1.0,
        }
        if number % 11 == 0:
            body["logprobs"] = 2
        if number % 13 == 0:
            body["frequency_penalty"] = 0.5
        if number % 29 == 0:
            body["response_format"] = {"type": "json_object"}
        hang_up = number % 7 == 0
        if number % 5 == 0 and not hang_up:
            answer = await self.http.post("/v1/completions", json=body)
            answer.raise_for_status()
            self.tokens += answer.json()["usage"]["completion_tokens"]
            self.done["whole"] += 1
            return
        started, seen = time.monotonic(), 0
        source = post_events(f"{self.url}/v1/completions", {**body, "stream": True})
        async with contextlib.aclosing(source) as events:
            async for event in events:
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                if not seen:
                    self.first_token.append(time.monotonic() - started)
                seen += 1
                if hang_up and seen > request.max_tokens // 3:
                    break
        if not seen:
            raise ValueError("an answer without a token")
        self.tokens += seen
        self.done["hung up" if hang_up else "streamed"] += 1


async def drive(url: str, args: argparse.Namespace, memory: Callable[[], int]) -> dict[str, Any]:
    """Run the load and read the figures."""
    limits = httpx.Limits(max_connections=args.clients + 4)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        started = time.monotonic()
        soak = Soak(url, http, model, started + args.seconds)
        load = Load(requests=2000, prefixes=8, most_prompt_tokens=args.prompt, most_answer_tokens=256)
        requests, numbers = itertools.cycle(make_requests(load)), itertools.count()
        clients = [asyncio.create_task(soak.client(requests, numbers)) for _ in range(args.clients)]
        readings: list[dict[str, Any]] = []
        while not all(client.done() for client in clients):
            await asyncio.sleep(READ_EVERY)
            stats = (await http.get("/stats")).json()
            kept = ("running", "waiting", "used_pages", "cached_pages", "generated_tokens", "preemptions")
            readings.append(
                {"at": round(time.monotonic() - started), "bytes": memory(), **{k: stats[k] for k in kept}}
            )
        await asyncio.gather(*clients)
        await asyncio.sleep(1)
        end = (await http.get("/stats")).json()
    taken = [reading["bytes"] for reading in readings]
    early, most = max(taken[: max(1, len(taken) // 4)]), max(taken)
    return {
        "requests": sum(soak.done.values()),
        "kinds": dict(soak.done),
        "errors": soak.errors[:20],
        "error_count": len(soak.errors),
        "tokens": soak.tokens,
        "tokens_per_second": round(soak.tokens / args.seconds, 1),
        "first_token_ms": {
            p: round(float(np.percentile(soak.first_token, p)) * 1e3, 1) for p in (50, 95, 99)
        },
        "step_ms": round(1e3 * args.seconds / max(1, end["steps"]), 2),
        "bytes_first_quarter": early,
        "bytes_most": most,
        "grew": most - early,
        "left": {name: end[name] for name in ("running", "waiting", "used_pages", "cached_pages", "failed")},
        "end": end,
        "readings": readings[:: max(1, len(readings) // 24)],
    }


def main() -> int:
    """Start the server, drive it, stop it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model-lib")
    parser.add_argument("--memory", default="6GB")
    parser.add_argument("--seconds", type=int, default=570)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--port", type=int, default=8977)
    args = parser.parse_args()
    command = [sys.executable, "-m", "kvq", "serve", args.model, "--device", args.device, "--mode", "server"]
    command += ["--memory", args.memory, "--port", str(args.port)]
    command += ["--model-lib", args.model_lib] if args.model_lib else []
    server = subprocess.Popen(command)
    memory: Callable[[], int] = lambda: 0  # noqa: E731 (another device: its memory is not read)
    with contextlib.suppress(LibraryError):
        memory = partial(GpuMemory().used_by, server.pid)
    url = f"http://127.0.0.1:{args.port}"
    try:
        while True:
            if server.poll() is not None:
                print("the server ended", file=sys.stderr)
                return 1
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{url}/health", timeout=2).raise_for_status()
                break
            time.sleep(0.5)
        found = asyncio.run(drive(url, args, memory))
    finally:
        server.terminate()
        server.wait(30)
    print(json.dumps(found))
    left = found["left"]
    leaked = left["running"] or left["waiting"] or left["used_pages"]
    return int(bool(found["error_count"] or left["failed"] or leaked or found["grew"] > MAY_GROW))


if __name__ == "__main__":
    sys.exit(main())
