"""A server over the fake model, in a thread of the test."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from fake_model import FakeModel, fake_core, fake_parts
from kvq.engine import AsyncEngine
from kvq.engine.core import EngineCore
from kvq.serve.app import ServerOptions
from kvq.serve.run import ServerThread
from kvq.tokenizer import Tokenizer

#: A chat template only in name: it says that tools are called as Hermes does it.
TEMPLATE = "{{ tools }} <tool_call>"


@dataclass
class Served:
    """A running server and what is behind it."""

    url: str
    http: httpx.Client
    model: FakeModel
    core: EngineCore
    engine: AsyncEngine
    server: ServerThread

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def text(self, prompt: str, **options: Any) -> httpx.Response:
        return self.post("/v1/completions", prompt=prompt, **options)

    def chat(self, content: str, **options: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **options)

    def wait_until(self, what: Callable[[], bool], seconds: float = 20) -> None:
        """Wait for something that the engine's thread does."""
        until = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < until, "it did not happen"
            time.sleep(0.005)

    def check_idle(self) -> None:
        """Nothing runs, and every page is free or the prefix cache's."""
        self.wait_until(lambda: not self.core.has_work)
        stats = self.core.stats()
        assert stats.running == stats.waiting == stats.used_pages == 0
        self.core.check_integrity()


@contextlib.contextmanager
def serve_fake(
    *,
    context: int = 300,
    num_open: int = 8,
    num_pages: int = 40,
    step_seconds: float = 0,
    config: dict[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> Iterator[Served]:
    """A server over a fake model; each step takes at least ``step_seconds``.

    Prompts are read by ``tokenizer`` if one is given; answers are Latin-1 all the same.
    """
    model = FakeModel(context=context, num_open=num_open, num_pages=num_pages)
    if step_seconds:
        model.fail = lambda _: time.sleep(step_seconds)
    core = fake_core(model, context=context)
    parts = fake_parts(core, **{"chat_template": TEMPLATE, "context_window_size": context, **(config or {})})
    if tokenizer is not None:
        parts = dataclasses.replace(parts, tokenizer=tokenizer)
    engine = AsyncEngine.of(parts)
    headers = {"Authorization": f"Bearer {options.get('api_key')}"}
    try:
        with (
            ServerThread(engine, ServerOptions("fake", **options)) as server,
            httpx.Client(base_url=server.url, headers=headers, timeout=30) as http,
        ):
            yield Served(server.url, http, model, core, engine, server)
    finally:
        engine.shutdown()
