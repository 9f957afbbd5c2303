"""Compare a library for a GPU with one for the CPU on the same weights: greedy tokens, teacher-forced logits.

    python scripts/check_device.py WEIGHTS CPU_LIBRARY LIBRARY [--device cuda] [--tokens N] [--text N]

WEIGHTS is a converted directory with its tokenizer. Prints one line of JSON. A prompt counts for the greedy
comparison where the CPU's two largest logits stay apart by more than 1e-3 at every token.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvq.eval.metrics import Distributions
from kvq.eval.text import read_text
from kvq.runtime.library import Library
from kvq.runtime.loaded_model import LoadedModel, load_model
from kvq.tokenizer.tokenizer import Tokenizer

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a little girl who",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "The three laws of thermodynamics are",
    "1, 2, 3, 4, 5, 6,",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, the first humans landed on",
)
#: Two logits closer than this may change places through rounding alone.
MARGIN = 1e-3
#: Tokens of a step of the teacher-forced comparison, and tokens at its end that go one by one.
CHUNK, SINGLE = 256, 128


def greedy(model: LoadedModel, prompt: list[int], count: int) -> tuple[list[int], float]:
    """The likeliest tokens after a prompt, and the smallest margin of any of them."""
    model.cache.add_sequence("greedy")
    tokens: list[int] = []
    margin = float("inf")
    step = prompt
    for _ in range(count):
        logits = model.step([("greedy", len(step))], step)[0]
        second, first = np.partition(logits, -2)[-2:]
        margin = min(margin, float(first - second))
        tokens.append(int(logits.argmax()))
        step = [tokens[-1]]
    model.cache.remove_sequence("greedy")
    return tokens, margin


def forced_logits(model: LoadedModel, tokens: list[int]) -> np.ndarray:
    """Logits after every token: in chunks, the last ones one by one as decode would."""
    model.cache.add_sequence("forced")
    out, at = [], 0
    while at < len(tokens):
        left = len(tokens) - at
        count = min(CHUNK, left - SINGLE) if left > SINGLE else 1
        rows = list(range(count))
        logits = model.step([("forced", count)], tokens[at : at + count], rows if count > 1 else None)
        out.append(logits.copy())
        at += count
    model.cache.remove_sequence("forced")
    return np.concatenate(out)


def compare_greedy(cpu: LoadedModel, gpu: LoadedModel, tokenizer: Tokenizer, count: int) -> dict[str, Any]:
    """Prompts that count, and those whose tokens are equal."""
    clear = equal = 0
    for text in PROMPTS:
        prompt = tokenizer.encode(text)
        expected, margin = greedy(cpu, prompt, count)
        found, _ = greedy(gpu, prompt, count)
        if margin > MARGIN:
            clear += 1
            equal += expected == found
        verdict = "equal" if expected == found else "DIFFERENT"
        print(f"margin {margin:.4f} {verdict}: {tokenizer.decode(found)!r}")
    return {"greedy_tokens": count, "greedy_prompts": clear, "greedy_equal": equal}


def compare_forced(cpu: LoadedModel, gpu: LoadedModel, tokens: list[int]) -> dict[str, Any]:
    """Agreement of the distributions after every token."""
    expected = forced_logits(cpu, tokens)
    started = time.perf_counter()
    found = forced_logits(gpu, tokens)
    seconds = time.perf_counter() - started
    top1 = float((expected.argmax(axis=1) == found.argmax(axis=1)).mean())
    largest = float(np.abs(found - expected).max())
    kl = Distributions.of(expected, probabilities=True).kl(Distributions.of(found))
    return {
        "forced_tokens": len(tokens),
        "top1_percent": 100 * top1,
        "kl_mean": float(np.mean(kl)),
        "kl_max": float(np.max(kl)),
        "logit_difference_max": largest,
        "seconds": seconds,
    }


def decode_rate(model: LoadedModel, prompt: list[int], count: int) -> float:
    """Tokens per second of decode alone."""
    model.cache.add_sequence("rate")
    model.step([("rate", len(prompt))], prompt)
    started = time.perf_counter()
    for _ in range(count):
        model.step([("rate", 1)], [11])
    seconds = time.perf_counter() - started
    model.cache.remove_sequence("rate")
    return count / seconds


def main() -> None:
    """Run the comparisons."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", type=Path)
    parser.add_argument("cpu_library", type=Path)
    parser.add_argument("library", type=Path)
    parser.add_argument("--device", default="cuda", help="the library's (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="greedy tokens of each prompt")
    parser.add_argument("--text", type=int, default=1024, help="tokens of the teacher-forced comparison")
    parser.add_argument("--rate", type=int, default=256, help="tokens of which the rate is measured")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_dir(args.weights)
    limits = {"context_window_size": max(args.text, 256) + 64, "max_batch_size": 2}
    cpu = load_model(args.cpu_library, args.weights, device="cpu", **limits)
    gpu = load_model(args.library, args.weights, device=args.device, **limits)
    tokens = tokenizer.encode(read_text("opticks"))[: args.text]
    result = {
        "device": args.device,
        "weights": gpu.metadata.quantization,
        "kv": gpu.metadata.kv_quantization,
        "threads": Library.load(args.cpu_library).threads,
        **compare_greedy(cpu, gpu, tokenizer, args.tokens),
        **compare_forced(cpu, gpu, tokens),
        "decode_tokens_per_second": decode_rate(gpu, tokens[:128], args.rate),
        "faults": gpu.faults.tolist(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
