"""What the host takes of a step and of a token: the server over a model that computes nothing.

    python scripts/bench_host.py --streams 1,16,64 --device-ms 2

Everything is the server's own (HTTP, scheduler, page tables, plans and copies of a GPU's steps) but the
kernels: a step sleeps for ``--device-ms`` instead, and tokens come from nowhere. The server is a process of
its own. Prints a line of JSON for each number of streams; the host has what is beyond ``--device-ms``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np

from kvq.bench.serve import bench_serve
from kvq.bench.serve_load import Load

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from host_memory import HostMemory

#: Of SmolLM2-135M, and of a GPU with 132 multiprocessors.
LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, BLOCKS = 30, 9, 3, 64, 49152, 132
CONTEXT, CHUNK, PAGES = 8192, 2048, 20_000


class IdleModel:
    """Stands in for ``LoadedModel`` on a GPU: all of a step but the kernels."""

    def __init__(self, streams: int, seconds: float) -> None:
        from kvq.layout import KVLayout
        from kvq.runtime.device import Device
        from kvq.runtime.kv_cache import PagedKVCache
        from kvq.runtime.metadata import DecodeSpec
        from kvq.runtime.step_plan import StepPlan
        from kvq.runtime.step_tensors import DeviceSteps

        layout = KVLayout(LAYERS, KV_HEADS, HEAD_DIM, 4, 4, 64, order="fragments")
        self.cache = PagedKVCache(layout, PAGES, streams, CHUNK // 64 + 1)
        self.plan = StepPlan(self.cache, CHUNK, streams * CONTEXT // 64, 4, 1024, on_gpu=True)
        metadata: Any = SimpleNamespace(
            decode=DecodeSpec(8, 2, 4),
            scratch_slots=1024,
            layout=layout,
            model=SimpleNamespace(num_attention_heads=HEADS),
            max_batch_size=streams,
        )
        device: Any = SimpleNamespace(kind="idle", handle=Device.open("cpu").handle, threads=BLOCKS)
        driver: Any = HostMemory()
        self._steps = DeviceSteps(self.plan, device, metadata, driver)
        self._seconds, self._rng = seconds, np.random.default_rng(0)
        self.faults = np.zeros(2, np.int64)

    def can_draw(self, params: Any) -> bool:
        """All that is asked here."""
        return True

    def step(self, *args: Any, **options: Any) -> np.ndarray:
        """Never asked: tokens are drawn."""
        raise NotImplementedError

    def draw(
        self,
        requests: list[tuple[Any, int]],
        ids: Any,
        draws: np.ndarray,
        logit_rows: list[int] | None = None,
        hosted: Sequence[int] = (),
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Plan a step and copy what it says; tokens at random."""
        from kvq.runtime.step_plan import build_step

        ends = (np.cumsum([count for _, count in requests]) - 1).tolist()
        decodes = logit_rows is None and len(ids) == len(requests)
        plan = build_step(self.plan, requests, BLOCKS, cut_attention=not decodes)
        if decodes:
            self._steps.decode(ids, draws)
        else:
            self._steps.prefill(ids, logit_rows or ends, draws)
        launched = time.perf_counter()
        if meanwhile is not None:
            meanwhile()
        self._steps.expect_next()
        time.sleep(max(0.0, self._seconds - (time.perf_counter() - launched)))
        self._steps.fetch_faults()
        plan.commit()
        self.faults += self._steps.faults()
        count = len(ends if logit_rows is None else logit_rows)
        return self._rng.integers(0, 256, count).astype(np.int32), np.empty((0, VOCAB), np.float32)


def serve(port: int, streams: int, seconds: float) -> None:
    """Serve the idle model until a signal comes."""
    from tokenizers import Tokenizer as Words
    from tokenizers import decoders, models, pre_tokenizers

    from kvq.config import ChatConfig, ModelConfig
    from kvq.engine import AsyncEngine
    from kvq.engine.core import EngineCore
    from kvq.engine.setup import EngineParts
    from kvq.serve.app import ServerOptions
    from kvq.serve.run import bind
    from kvq.serve.run import serve as run
    from kvq.tokenizer import Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Words(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(words, None)
    model: Any = IdleModel(streams, seconds)
    core = EngineCore(
        model, tokenizer.stream, context_window_size=CONTEXT, prefill_chunk_size=CHUNK, vocab_size=VOCAB
    )
    config = ChatConfig(
        model_type="llama",
        quantization="idle",
        model=ModelConfig(
            model_type="llama",
            vocab_size=VOCAB,
            hidden_size=HEADS * HEAD_DIM,
            intermediate_size=HEADS * HEAD_DIM,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            rms_norm_eps=1e-5,
        ),
        vocab_size=VOCAB,
        active_vocab_size=VOCAB,
        context_window_size=CONTEXT,
        prefill_chunk_size=CHUNK,
        max_batch_size=streams,
        conv_template="idle",
        stop_token_ids=[],
    )
    unused: Any = None
    engine = AsyncEngine.of(
        EngineParts(core, model, tokenizer, config, unused, unused, unused, model_name="idle")
    )
    run(engine, ServerOptions("idle"), bind("127.0.0.1", port), 0.0)


def measure(port: int, streams: int, args: argparse.Namespace) -> dict[str, Any]:
    """Start a server, load it with so many streams, and tell what it took."""
    command = [sys.executable, __file__, "--serve", str(port), "--streams", str(streams)]
    server = subprocess.Popen([*command, "--device-ms", str(args.device_ms)])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                httpx.get(f"{url}/health", timeout=1).raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        load = Load(
            requests=streams * args.rounds,
            clients=streams,
            shared_part=0,
            most_prompt_tokens=64,
            most_answer_tokens=args.tokens,
        )
        bench_serve(url, Load(requests=streams, clients=streams, shared_part=0, most_answer_tokens=16))
        before = httpx.get(f"{url}/stats").json()
        found = bench_serve(url, load).to_dict()
        after = httpx.get(f"{url}/stats").json()
    finally:
        server.terminate()
        server.wait(30)
    steps = after["steps"] - before["steps"]
    return {
        "streams": streams,
        "device_ms": args.device_ms,
        "step_ms": round(1e3 * found["seconds"] / steps, 3),
        "rows_per_step": round((after["decode_rows"] - before["decode_rows"]) / steps, 1),
        "requests_per_second": round(found["requests_per_second"], 1),
        "tokens_per_second": round(found["answer_tokens_per_second"]),
        "next_token_ms_p50": round(1e3 * found["inter_token_p50"], 2),
        "next_token_ms_p99": round(1e3 * found["inter_token_p99"], 2),
        "errors": found["errors"],
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", default="1,16,64", metavar="LIST")
    parser.add_argument("--device-ms", type=float, default=2.0, metavar="MS")
    parser.add_argument("--rounds", type=int, default=4, help="requests of each stream")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--port", type=int, default=8978)
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    streams = [int(one) for one in args.streams.split(",")]
    if args.serve is not None:
        serve(args.serve, streams[0], args.device_ms / 1e3)
        return
    for count in streams:
        print(json.dumps(measure(args.port, count, args)), flush=True)


if __name__ == "__main__":
    main()
