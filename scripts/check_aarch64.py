"""Run a library for aarch64 Linux under qemu; compare its greedy tokens with those of one for this machine.

    python scripts/check_aarch64.py WEIGHTS ROOT SITE [--tokens N] [--prompts I...]

WEIGHTS is a converted directory with its tokenizer, best in ``q0f32`` without a quantized cache: then both
libraries compute the same but for the order of sums. ROOT is a folder of unpacked Debian packages for arm64
(python3.11 and what it needs), SITE one of wheels for aarch64:

    pip install --target SITE --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 \\
        --python-version 3.11 --only-binary=:all: apache-tvm==0.27.0.post1 'apache-tvm-ffi<0.2' numpy \\
        ml_dtypes safetensors gguf tokenizers jinja2 pydantic rich

Prints one line of JSON. A prompt counts where the two largest logits stay apart by more than 1e-3 at every
token.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from check_device import MARGIN, answer, margins
from kvq.runtime.loaded_model import load_model
from kvq.tokenizer.tokenizer import Tokenizer

PROMPTS = ("The capital of France is", "1, 2, 3, 4, 5, 6,", "Water boils at a temperature of")
#: Limits of both libraries.
OVERRIDES = "context_window_size=256;prefill_chunk_size=32;max_batch_size=1"


def greedy(weights: Path, library: Path, prompts: list[int], count: int) -> list[dict[str, Any]]:
    """The likeliest tokens after each prompt, the smallest margin, and the seconds it took."""
    tokenizer = Tokenizer.from_dir(weights)
    model = load_model(library, weights)
    found = []
    for prompt in (PROMPTS[i] for i in prompts):
        start = time.perf_counter()
        tokens, logits = answer(model, [tokenizer.encode(prompt)], count)
        seconds = time.perf_counter() - start
        found.append({"tokens": tokens[0].tolist(), "margin": float(margins(logits)[0]), "seconds": seconds})
    return found


def run(command: list[str], environment: dict[str, str], arguments: list[str]) -> list[dict[str, Any]]:
    """:func:`greedy` in another process."""
    script = [*command, str(Path(__file__).resolve()), *arguments]
    done = subprocess.run(script, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", type=Path)
    parser.add_argument("root", type=Path, nargs="?")
    parser.add_argument("site", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, nargs="+", choices=range(len(PROMPTS)), default=[0, 1, 2])
    parser.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.library:
        print(json.dumps(greedy(args.weights, args.library, args.prompts, args.tokens)))
        return 0

    from kvq.compiler import compile_model

    libraries = [
        compile_model(args.weights, args.weights / f"lib-{host}", host=host, opt="O1", overrides=OVERRIDES)
        for host in ("linux-x86_64", "linux-aarch64")
    ]
    shared = [str(args.weights), "--tokens", str(args.tokens), "--prompts", *map(str, args.prompts)]
    here = run([sys.executable], {}, [*shared, "--library", str(libraries[0])])
    python, sources = args.root / "usr/bin/python3.11", Path(__file__).resolve().parents[1] / "python"
    there = run(
        ["qemu-aarch64", "-L", str(args.root), str(python)],
        {"PYTHONPATH": f"{args.site}:{sources}", "TVM_NUM_THREADS": "1", "TVM_USE_RUNTIME_LIB": "1"},
        [*shared, "--library", str(libraries[1])],
    )
    counted = [(a, b) for a, b in zip(here, there, strict=True) if a["margin"] > MARGIN]
    report = {
        "prompts": len(counted),
        "tokens": args.tokens,
        "equal": sum(a["tokens"] == b["tokens"] for a, b in counted),
        "smallest_margin": min((a["margin"] for a, _ in counted), default=None),
        "seconds": {"here": sum(a["seconds"] for a in here), "qemu": sum(b["seconds"] for b in there)},
    }
    print(json.dumps(report))
    return 0 if counted and report["equal"] == len(counted) else 1


if __name__ == "__main__":
    raise SystemExit(main())
