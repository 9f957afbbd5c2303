"""``kvq serve`` on a compiled model: as a process, and under twenty-four clients with too few pages for all.

``KVQ_SOAK_SECONDS=300`` has the clients ask for five minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from checkpoints import write_tiny_llama
from kvq.build import BuiltModel, prepare_model
from kvq.config import ChatConfig
from kvq.engine import AsyncEngine
from kvq.engine.completions import Completions
from kvq.engine.core import EngineCore
from kvq.engine.driver import Driver
from kvq.engine.setup import EngineParts
from kvq.runtime.cache_shape import CacheShape
from kvq.runtime.library import Library
from kvq.runtime.loaded_model import LoadedModel
from kvq.serve.app import ServerOptions
from kvq.serve.run import ServerThread
from kvq.tokenizer import Tokenizer

SECONDS = float(os.environ.get("KVQ_SOAK_SECONDS", "20"))
CLIENTS, SEQUENCES, PAGES, CONTEXT, CHUNK = 24, 12, 12, 448, 128


@dataclass(frozen=True)
class Question:
    """A prompt and how many tokens to answer."""

    prompt: list[int]
    max_tokens: int


def questions() -> list[Question]:
    """Prompts with a shared beginning, with a part of one (cut anywhere), and of their own."""
    rng = np.random.RandomState(7)
    shared = [rng.randint(3, 250, 150).tolist() for _ in range(3)]
    made = []
    for index in range(48):
        own = rng.randint(3, 250, rng.randint(1, 60)).tolist()
        beginning = shared[rng.randint(3)]
        prompt = [own, beginning + own, own, beginning[: rng.randint(1, 150)] + own][index % 4]
        # Those of their own grow by more pages than admission foresees, which is what forces preemption.
        most = int(rng.randint(150, 250) if index % 2 == 0 else rng.randint(1, 60))
        made.append(Question(prompt, most))
    return made


@pytest.fixture(scope="module")
def built(build_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> BuiltModel:
    checkpoint = write_tiny_llama(tmp_path_factory.mktemp("tiny"), vocab_size=264)
    return prepare_model(checkpoint, "q4f16kv", cache_dir=build_cache)


@pytest.fixture(scope="module")
def parts(built: BuiltModel) -> Any:
    """Makes cores over one compiled model: pages, open pages, and whether prefixes are kept."""
    library = Library.load(built.library)
    params = library.load_params(built.weights_dir)
    tokenizer, config = Tokenizer.from_dir(built.config_dir), ChatConfig.load(built.config_dir)
    layout = library.metadata.layout

    def make(pages: int, num_open: int, prefix_cache: bool) -> EngineParts:
        shape = CacheShape(pages, num_open, max(1, layout.workspace_pages_for(CHUNK)))
        model = LoadedModel(library, params, shape, CHUNK)
        core = EngineCore(
            model,
            tokenizer.stream,
            context_window_size=CONTEXT,
            prefill_chunk_size=CHUNK,
            vocab_size=config.active_vocab_size,
            prefix_cache=prefix_cache,
        )
        nothing: Any = None
        return EngineParts(core, model, tokenizer, config, library.metadata, nothing, shape, "tiny")

    return make


@pytest.fixture(scope="module")
def solo(parts: Any) -> list[str]:
    """The answers that one request at a time gets, without a prefix cache."""
    alone = parts(CONTEXT // 64, 1, prefix_cache=False)
    completions = Completions(Driver(alone.core), alone.tokenizer, alone.config, "tiny")
    return [
        completions.create(prompt=q.prompt, max_tokens=q.max_tokens, temperature=0, ignore_eos=True)
        .choices[0]
        .text
        for q in questions()
    ]


class Client:
    """Asks one question after the other, in one of the ways that clients have."""

    def __init__(self, http: httpx.AsyncClient, seed: int, solo: list[str], done: Counter[str]) -> None:
        self._http, self._rng, self._solo, self._done = http, np.random.RandomState(seed), solo, done
        self._questions = questions()

    async def run(self, until: float) -> None:
        ways = [self.whole, self.choices, self.stream, self.leave_stream, self.leave_whole]
        while time.monotonic() < until:
            way = ways[self._rng.choice(len(ways), p=[0.35, 0.1, 0.35, 0.12, 0.08])]
            index = self._rng.randint(len(self._questions))
            await way(index)
            self._done[way.__name__] += 1

    def _body(self, index: int, **more: Any) -> dict[str, Any]:
        question = self._questions[index]
        return {
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }

    async def whole(self, index: int) -> None:
        await self._post(index)

    async def choices(self, index: int) -> None:
        await self._post(index, n=2)

    async def _post(self, index: int, **more: Any) -> None:
        response = await self._http.post("/v1/completions", json=self._body(index, **more))
        assert response.status_code == 200, response.text
        for choice in response.json()["choices"]:
            assert choice["text"] == self._solo[index], f"question {index}"

    async def stream(self, index: int) -> None:
        texts = [text async for text in self._texts(index)]
        assert "".join(texts) == self._solo[index], f"question {index}"

    async def leave_stream(self, index: int) -> None:
        left = self._rng.randint(0, 10)
        texts = []
        async for text in self._texts(index):
            texts.append(text)
            if len(texts) > left:
                break
        assert self._solo[index].startswith("".join(texts))

    async def leave_whole(self, index: int) -> None:
        with_patience = float(self._rng.uniform(0, 0.3))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._post(index), with_patience)

    async def _texts(self, index: int) -> Any:
        body = self._body(index, stream=True)
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    yield event["choices"][0]["text"]


@pytest.mark.slow
def test_many_clients_for_a_while(parts: Any, solo: list[str]) -> None:
    busy = parts(PAGES, SEQUENCES, prefix_cache=True)
    core, cache = busy.core, busy.model.cache
    engine = AsyncEngine.of(busy)
    done: Counter[str] = Counter()

    async def load(url: str) -> None:
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
            until = time.monotonic() + SECONDS
            await asyncio.gather(*(Client(http, seed, solo, done).run(until) for seed in range(CLIENTS)))

    with ServerThread(engine, ServerOptions("tiny")) as server:
        asyncio.run(load(server.url))
        stats = _idle(core)
    print(f"\n{dict(done)}\n{stats}")
    assert len(done) == 5 and min(done.values()) > 0
    assert stats.failed == 0 and stats.used_pages == 0 and stats.cancelled > 0
    assert stats.preemptions > 0 and stats.evicted_pages > 0, "the pool was not under pressure"
    assert stats.hit_tokens > 0
    core.check_integrity()
    engine.reset()
    _idle(core)
    engine.shutdown()
    core.check_integrity()
    assert cache.num_free_pages == cache.pool.num_pages == PAGES and not cache.sequence_ids


def _idle(core: EngineCore) -> Any:
    until = time.monotonic() + 20
    while core.has_work:
        assert time.monotonic() < until, "requests that nobody waits for go on"
        time.sleep(0.01)
    return core.stats()


@pytest.mark.slow
def test_the_process_serves_and_ends_in_order(built: BuiltModel, tmp_path: Path) -> None:
    pair = tmp_path / "tiny"
    for source in (built.config_dir, built.weights_dir):
        shutil.copytree(source, pair, dirs_exist_ok=True)
    words = ["serve", str(pair), "--port", "0", "--max-num-sequence", "3", "--drain-seconds", "20"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvq", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving tiny at http://127.0.0.1:"), process.communicate()[1]
        url = line.split()[3].removesuffix("/v1")
        with httpx.Client(base_url=url, timeout=60) as http:
            assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
            assert http.get("/stats").json()["max_running"] == 3
            body = {"prompt": "once", "max_tokens": 300, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                first = next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line.startswith("data: {")]
        assert "error" not in json.loads(first[6:])
        assert json.loads(rest[-1][6:])["choices"][0]["finish_reason"] == "length" and len(rest) == 299
        assert process.wait(30) == 0
        assert process.stderr is not None
        said = process.stderr.read()
        assert "memory plan: weights" in said and "3 open pages" in said
        assert "1 requests run and 0 wait" in said and "0 requests had to be aborted" in said
        assert "Traceback" not in said
    finally:
        process.kill()
        process.communicate()
