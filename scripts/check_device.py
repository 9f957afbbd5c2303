"""Compare a library for a GPU with one for the CPU on the same weights: greedy tokens, teacher-forced logits.

    python scripts/check_device.py WEIGHTS CPU_LIBRARY LIBRARY [--floor CPU_LIBRARY] [--device cuda]

WEIGHTS is a converted directory with its tokenizer. Two texts are forced on both: the CPU's greedy answers
to eight prompts, side by side, and pages of a book. A prompt counts for the greedy comparison where the CPU's
two largest logits stay apart by more than 1e-3 at every token. Another library for the CPU, of another
``--opt``, says what rounding alone does (``floor``). Prints one line of JSON.
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


def answer(
    model: LoadedModel, prompts: list[list[int]], count: int, tokens: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Continue prompts side by side, by the likeliest tokens or by given ones.

    Returns
    -------
    tokens : numpy.ndarray
        int64 ``[prompts, count]``: the likeliest ones, whatever was given.
    logits : numpy.ndarray
        float32 ``[prompts, count, vocabulary]``: what they were the likeliest of.
    """
    names = [f"prompt {i}" for i in range(len(prompts))]
    for name in names:
        model.cache.add_sequence(name)
    logits, steps = [], prompts
    for at in range(count):
        requests = [(name, len(step)) for name, step in zip(names, steps, strict=True)]
        logits.append(model.step(requests, [token for step in steps for token in step]).copy())
        following = logits[-1].argmax(axis=1) if tokens is None else tokens[:, at]
        steps = [[int(token)] for token in following]
    for name in names:
        model.cache.remove_sequence(name)
    stacked = np.stack(logits, axis=1)
    return stacked.argmax(axis=2), stacked


def margins(logits: np.ndarray) -> np.ndarray:
    """The smallest difference of the two largest logits ``[..., tokens, vocabulary]`` of all tokens."""
    largest = np.partition(logits, -2, axis=-1)[..., -2:]
    return (largest[..., 1] - largest[..., 0]).min(axis=-1)


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


def agreement(expected: np.ndarray, found: np.ndarray) -> dict[str, Any]:
    """How far the distributions after every token ``[..., vocabulary]`` agree."""
    expected, found = (logits.reshape(-1, logits.shape[-1]) for logits in (expected, found))
    kl = Distributions.of(expected, probabilities=True).kl(Distributions.of(found))
    return {
        "tokens": len(expected),
        "top1_percent": 100 * float((expected.argmax(axis=1) == found.argmax(axis=1)).mean()),
        "kl_mean": float(np.mean(kl)),
        "kl_max": float(np.max(kl)),
        "logit_difference_max": float(np.abs(found - expected).max()),
    }


class Reference:
    """What the CPU makes of the prompts and of the text, to compare other libraries with."""

    def __init__(self, model: LoadedModel, prompts: list[list[int]], count: int, text: list[int]) -> None:
        self.prompts, self.count, self.text = prompts, count, text
        self.tokens, self.answers = answer(model, prompts, count)
        self.forced = forced_logits(model, text)

    def compare(self, model: LoadedModel, tokenizer: Tokenizer) -> dict[str, Any]:
        """Equal answers, and the agreement on the answers and on the text.

        Forced to follow the reference a model finds its likeliest tokens all the way exactly if it would have
        answered the same by itself.
        """
        tokens, answers = answer(model, self.prompts, self.count, self.tokens)
        clear, equal = margins(self.answers), (tokens == self.tokens).all(axis=1)
        for margin, same, row in zip(clear, equal, self.tokens, strict=True):
            print(
                f"margin {margin:.4f} {'equal' if same else 'DIFFERENT'}: {tokenizer.decode(row.tolist())!r}"
            )
        return {
            "greedy_prompts": int((clear > MARGIN).sum()),
            "greedy_equal": int(equal[clear > MARGIN].sum()),
            "answers": agreement(self.answers, answers),
            "text": agreement(self.forced, forced_logits(model, self.text)),
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
    parser.add_argument("--floor", type=Path, help="another library for the CPU")
    parser.add_argument("--device", default="cuda", help="the library's (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="greedy tokens of each prompt")
    parser.add_argument("--text", type=int, default=1024, help="tokens of the book")
    parser.add_argument("--rate", type=int, default=256, help="tokens of which the rate is measured")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_dir(args.weights)
    limits = {"context_window_size": max(args.text, 256) + 64, "max_batch_size": len(PROMPTS)}
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    text = tokenizer.encode(read_text("opticks"))[: args.text]
    cpu = load_model(args.cpu_library, args.weights, device="cpu", **limits)
    reference = Reference(cpu, prompts, args.tokens, text)
    result: dict[str, Any] = {"device": args.device, "threads": Library.load(args.cpu_library).threads}
    if args.floor:
        floor = load_model(args.floor, args.weights, device="cpu", **limits)
        result["floor"] = reference.compare(floor, tokenizer)
    gpu = load_model(args.library, args.weights, device=args.device, **limits)
    result |= {
        "weights": gpu.metadata.quantization,
        "kv": gpu.metadata.kv_quantization,
        **reference.compare(gpu, tokenizer),
        "decode_tokens_per_second": decode_rate(gpu, text[:128], args.rate),
        "faults": gpu.faults.tolist(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
