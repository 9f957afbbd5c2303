"""Users of a model's shape with random weights in a memory budget on a GPU: who runs at once, and how fast.

    kvq bench decode llama-2-70b --random-weights --device cuda --compile-only --libraries DIRECTORY
    python scripts/bench_users.py DIRECTORY/LIBRARY.so --memory 48GB --requests 20 --prompt 2000 --tokens 100

Every request has a prompt of its own, half of them draw with top-p. The plan, the scheduler and the steps are
those of the server, without HTTP. Then prompts of many lengths follow, one after another (``--mix``), and the
first ones come again: their prefixes are still there. Prints a line of JSON: requests at once, seconds,
tokens, and the memory that the driver counts, context and code included.
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
    """Run the requests on the library."""
    from kvq.engine.core import EngineCore
    from kvq.engine.request import Request
    from kvq.memory_budget import fit_cache
    from kvq.runtime.gpu_memory import GpuMemory
    from kvq.runtime.library import Library
    from kvq.runtime.loaded_model import LoadedModel
    from kvq.runtime.random_params import random_params
    from kvq.runtime.sampler import SamplingParams
    from kvq.sizes import parse_size

    memory = GpuMemory()
    before = memory.used
    library = Library.load(path, "cuda")
    library.device.synchronize()
    context = memory.used - before
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
        max_num_sequence=args.users,
        scratch_slots=meta.scratch_slots,
        step_bytes=meta.step_bytes,
        device_bytes=memory.overhead(before),
    )
    params = random_params(library)
    weights = memory.used - before
    model = LoadedModel(library, params, shape, meta.prefill_chunk_size)
    core = EngineCore(
        model,
        NoText,
        context_window_size=meta.context_window_size,
        prefill_chunk_size=meta.prefill_chunk_size,
        vocab_size=meta.model.vocab_size,
    )
    rng = np.random.default_rng(0)
    vocab = meta.model.vocab_size
    loaded = most = memory.used - before

    def run(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Run requests to their ends; figures of them."""
        nonlocal most
        started = time.perf_counter()
        first: dict[int, float] = {}
        drawn: dict[int, int] = {}
        ended: dict[int, str] = {}
        at_once = 0
        for at, prompt in enumerate(prompts):
            sampling = SamplingParams(seed=at, top_p=0.9) if at % 2 else SamplingParams(temperature=0.0)
            core.add(Request(prompt, sampling, max_tokens=tokens))
        steps = []
        while core.has_work:
            begun = time.perf_counter()
            for index, piece in core.step():
                first.setdefault(index, time.perf_counter() - started)
                drawn[index] = drawn.get(index, 0) + 1
                if piece.finish_reason:
                    ended[index] = piece.finish_reason
            steps.append(time.perf_counter() - begun)
            most = max(most, memory.used - before)
            at_once = max(at_once, core.stats().running)
        seconds = time.perf_counter() - started
        return {
            "at_once": at_once,
            "ends": sorted(set(ended.values())),
            "seconds": round(seconds, 2),
            "tokens_per_second": round(sum(drawn.values()) / seconds, 1),
            "first_token_seconds_median": round(float(np.median(list(first.values()))), 2),
            "first_token_seconds_last": round(max(first.values()), 2),
            "step_ms_median": round(float(np.median(steps)) * 1e3, 2),
        }

    prompts = [rng.integers(0, vocab, args.prompt).tolist() for _ in range(args.requests)]
    figures = run(prompts, args.tokens)
    stats = core.stats()
    page = meta.layout.page_size
    after_first = memory.used - before
    lengths = rng.integers(1, args.prompt, args.mix).tolist()
    mix = run([rng.integers(0, vocab, length).tolist() for length in lengths], 3) if args.mix else {}
    hits = core.stats().hit_tokens
    again = run(prompts[-2:], 2)
    return {
        "library": path.stem,
        "kv": meta.kv_quantization,
        "requests": args.requests,
        **figures,
        "most_at_once": stats.max_running,
        "failed": core.stats().failed,
        "preemptions": stats.preemptions,
        "pool_tokens": shape.num_pages * page,
        "pool_tokens_beside": shape.num_pages * page - stats.peak_pages * page,
        "mix_seconds": mix.get("seconds"),
        "again_hit_tokens": core.stats().hit_tokens - hits,
        "again_first_token_seconds": again["first_token_seconds_last"],
        "plan": plan.to_dict(),
        "driver_bytes": {
            "context": context,
            "weights": weights,
            "loaded": loaded,
            "after_first": after_first,
            "most": most,
        },
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", type=Path)
    parser.add_argument("--memory", default="48GB")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--users", type=int, help="--max-num-sequence of the server")
    parser.add_argument("--mix", type=int, default=40)
    args = parser.parse_args()
    print(json.dumps(serve(args.library, args)), flush=True)


if __name__ == "__main__":
    main()
