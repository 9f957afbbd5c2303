"""Users of a model's shape with random weights in a memory budget on a GPU: who runs at once, and how fast.

    python scripts/bench_shape.py compile llama-2-70b DIRECTORY --kv int4,int3,none --context 4096
    python scripts/bench_users.py DIRECTORY/*.so --memory 48GB --requests 20 --prompt 2000 --tokens 100

Every request has a prompt of its own. The plan, the scheduler and the steps are those of the server, without
HTTP. Prints one line of JSON a library: requests at once, seconds, tokens, and the memory that the driver
counts.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np


class NoText:
    """A detokenizer for tokens that mean nothing."""

    def put(self, index: int) -> str:
        """Nothing."""
        return ""

    def flush(self) -> str:
        """Nothing."""
        return ""


def serve(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run the requests on one library."""
    from kvq.engine.core import EngineCore
    from kvq.engine.request import Request
    from kvq.memory import fit_cache, parse_size
    from kvq.runtime.cuda_driver import CudaDriver
    from kvq.runtime.library import Library
    from kvq.runtime.loaded_model import LoadedModel
    from kvq.runtime.random_params import random_params
    from kvq.runtime.sampler import SamplingParams

    library = Library.load(path, "cuda")
    driver = CudaDriver()
    free = driver.memory()[0]
    meta = library.metadata
    shape, plan = fit_cache(
        meta.model,
        meta.layout,
        weights_bytes=library.params_bytes,
        context_window_size=meta.context_window_size,
        prefill_chunk_size=meta.prefill_chunk_size,
        max_batch_size=meta.max_batch_size,
        mode="server",
        budget=parse_size(args.memory),
        scratch_slots=meta.scratch_slots,
    )
    model = LoadedModel(library, random_params(library), shape, meta.prefill_chunk_size)
    core = EngineCore(
        model,
        NoText,
        context_window_size=meta.context_window_size,
        prefill_chunk_size=meta.prefill_chunk_size,
        vocab_size=meta.model.vocab_size,
    )
    rng = np.random.default_rng(0)
    greedy = SamplingParams(temperature=0.0)
    for _ in range(args.requests):
        prompt = rng.integers(0, meta.model.vocab_size, args.prompt).tolist()
        core.add(Request(prompt, greedy, max_tokens=args.tokens))
    started = time.perf_counter()
    first: dict[int, float] = {}
    tokens: dict[int, int] = {}
    ended: dict[int, str] = {}
    loaded = most = free - driver.memory()[0]
    at_once = 0
    while core.has_work:
        for index, piece in core.step():
            first.setdefault(index, time.perf_counter() - started)
            tokens[index] = tokens.get(index, 0) + 1
            if piece.finish_reason:
                ended[index] = piece.finish_reason
        most = max(most, free - driver.memory()[0])
        at_once = max(at_once, core.stats().running)
    seconds = time.perf_counter() - started
    stats = core.stats()
    page = meta.layout.page_size
    return {
        "library": path.stem,
        "kv": meta.kv_quantization,
        "requests": args.requests,
        "at_once": at_once,
        "most_at_once": stats.max_running,
        "ends": sorted(set(ended.values())),
        "failed": stats.failed,
        "preemptions": stats.preemptions,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(sum(tokens.values()) / seconds, 1),
        "first_token_seconds_median": round(float(np.median(list(first.values()))), 2),
        "first_token_seconds_last": round(max(first.values()), 2),
        "pool_tokens": shape.num_pages * page,
        "pool_tokens_beside": shape.num_pages * page - stats.peak_pages * page,
        "plan_bytes": plan.total_bytes,
        "activation_bytes": plan.activation_bytes,
        "driver_bytes_loaded": loaded,
        "driver_bytes_most": most,
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("libraries", type=Path, nargs="+")
    parser.add_argument("--memory", default="48GB")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=100)
    args = parser.parse_args()
    for path in args.libraries:
        print(json.dumps(serve(path, args)), flush=True)


if __name__ == "__main__":
    main()
