"""Speed of whole steps of a shape with random weights on a GPU, for machines without TVM's compiler, too.

    python scripts/bench_shape.py compile llama-3-8b DIRECTORY --kv int4,none --context 131584
    python scripts/bench_shape.py run DIRECTORY/*.so --context 1024,131072 --batch 64x8192 --prefill 4096

``compile`` needs no GPU (``--cuda-arch``, by default sm_90). ``run`` prints one line of JSON a figure: decode
is greedy, through ``LoadedModel.step``, its launches in CUDA graphs; ``gpu_ms`` is the graph alone. Contexts
beyond ``--fill`` tokens are not computed: pages are copies of computed ones, each sequence with its own, so
that the device's cache holds no more than it would.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: Rows of a prefill step.
CHUNK = 2048
#: Tokens that a measurement appends, at most.
ROOM = 256


def compile_all(args: argparse.Namespace) -> None:
    """Compile a library for each cache scheme."""
    from kvq.bench.shape import shape_directory
    from kvq.compiler import compile_model

    directory = shape_directory(args.shape, args.quantization, args.context)
    args.directory.mkdir(parents=True, exist_ok=True)
    for kv in args.kv.split(","):
        out = args.directory / f"{args.shape}-{args.quantization}-{kv.replace(':', '-').replace('=', '')}.so"
        overrides = f"kv_quantization={kv}"
        compile_model(directory, out, device="cuda", cuda_arch=args.cuda_arch, overrides=overrides)
        print(out, flush=True)


class Bench:
    """One library and its weights."""

    def __init__(self, library: Any, params: Any) -> None:
        self.library, self.params = library, params
        self.vocab = library.metadata.model.vocab_size
        self.rng = np.random.default_rng(0)

    def model(self, context: int, batch: int) -> Any:
        """A model whose cache holds ``batch`` sequences of ``context`` tokens."""
        from kvq.runtime.cache_shape import CacheShape
        from kvq.runtime.loaded_model import LoadedModel

        shape = CacheShape.for_limits(
            self.library.metadata.layout,
            context_window_size=context + ROOM,
            max_batch_size=batch,
            prefill_chunk_size=CHUNK,
        )
        return LoadedModel(self.library, self.params, shape, CHUNK)

    def prefill(self, model: Any, sequence: str, until: int) -> None:
        """Compute a sequence up to ``until`` tokens."""
        while (length := model.cache.length(sequence)) < until:
            count = min(CHUNK, until - length)
            model.likeliest([(sequence, count)], self.rng.integers(0, self.vocab, count))

    def fill(self, model: Any, names: Sequence[str], context: int, computed: int) -> None:
        """Bring all sequences to ``context`` tokens: the first computes ``computed``, the rest is copied."""
        from kvq.runtime.library import nbytes
        from kvq.runtime.step_plan import build_step

        if model.cache.length(names[0]) < min(context, computed):
            self.prefill(model, names[0], min(context, computed))
        if context > computed or len(names) > 1:
            valid = [int(page) for page in model.plan.page_table[: model.plan.table_entries]]
            pool = model.tensors.pool
            words = nbytes(pool) // pool.shape[0] // np.dtype(pool.dtype).itemsize

            def page(index: int) -> Any:
                return pool._create_view((words,), relative_byte_offset=index * words * 4)

            for index in sorted(set(range(pool.shape[0])) - set(valid)):
                page(index).copyfrom(page(valid[index % len(valid)]))
        for name in names:
            while (length := model.cache.length(name)) < context:
                build_step(model.plan, [(name, min(CHUNK, context - length))], self.library.threads).commit()

    def decode(self, model: Any, names: Sequence[str], steps: int = 32, rounds: int = 3) -> dict[str, float]:
        """Tokens a second of decode steps, and milliseconds of a step."""
        requests = [(name, 1) for name in names]
        ids: Any = [1] * len(names)
        times = []
        for turn in range(rounds + 1):
            started = time.perf_counter()
            for _ in range(steps if turn else 4):
                ids = np.maximum(model.likeliest(requests, ids), 0)
            if turn:
                times.append((time.perf_counter() - started) / steps)
        wall = statistics.median(times)
        return {
            "tokens_per_second": len(names) / wall,
            "ms": wall * 1e3,
            "gpu_ms": self.graph_seconds(model) * 1e3,
        }

    @staticmethod
    def graph_seconds(model: Any) -> float:
        """Seconds that the graph of the last step takes by itself."""
        from kvq.bench.cuda_graph import Driver

        driver = Driver()
        driver.stream = model._driver.stream
        executable, _ = list(model._graphs._graphs.values())[-1]
        return statistics.median(driver.time(lambda: driver.launch(executable), 7))


def run(args: argparse.Namespace) -> None:
    """Measure every library."""
    from kvq.runtime.library import Library
    from kvq.runtime.random_params import random_params

    params = None
    for path in args.libraries:
        library = Library.load(path, "cuda")
        params = params or random_params(library)
        bench = Bench(library, params)
        common = {"library": path.stem, "kv": library.metadata.kv_quantization}

        def show(common: dict[str, Any] = common, **figures: Any) -> None:
            print(
                json.dumps(
                    {**common, **{k: round(v, 2) if isinstance(v, float) else v for k, v in figures.items()}}
                ),
                flush=True,
            )

        if args.prefill:
            model = bench.model(args.prefill, 1)
            rates = []
            for _ in range(4):
                model.cache.add_sequence("p")
                started = time.perf_counter()
                bench.prefill(model, "p", args.prefill)
                rates.append(args.prefill / (time.perf_counter() - started))
                model.cache.remove_sequence("p")
            show(prefill=args.prefill, chunk=CHUNK, tokens_per_second=statistics.median(rates[1:]))
            del model
        cases = [(1, int(context)) for context in filter(None, args.context.split(","))]
        cases += [tuple(map(int, case.split("x"))) for case in filter(None, args.batch.split(","))]
        for batch, context in cases:
            model = bench.model(context, batch)
            names = [f"s{i}" for i in range(batch)]
            for name in names:
                model.cache.add_sequence(name)
            bench.fill(model, names, context, args.fill)
            show(batch=batch, context=context, **bench.decode(model, names))
            del model


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("compile")
    one.add_argument("shape")
    one.add_argument("directory", type=Path)
    one.add_argument("--kv", default="int4,none")
    one.add_argument("--quantization", default="q4f16_1")
    one.add_argument("--context", type=int, default=131584)
    one.add_argument("--cuda-arch", default="sm_90")
    one.set_defaults(func=compile_all)
    two = commands.add_parser("run")
    two.add_argument("libraries", type=Path, nargs="+")
    two.add_argument("--context", default="1024,8192,32768,131072")
    two.add_argument("--batch", default="16x2048,64x2048,64x8192")
    two.add_argument("--prefill", type=int, default=4096)
    two.add_argument("--fill", type=int, default=8192)
    two.set_defaults(func=run)
    args = parser.parse_args()
    args.func(args)


if __name__ == "__main__":
    main()
