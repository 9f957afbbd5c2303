"""Tiny checkpoints of every family on a GPU, against the logits that transformers computed.

    python scripts/check_families.py compile DIRECTORY [--device cuda] [--cuda-arch sm_90a]
    python scripts/check_families.py run DIRECTORY [--device cuda]

Weights are float32, the cache is not quantized, activations are exact. Compiling needs no GPU, running no
compiler. Prints the largest difference of each family and ends with 1 if one exceeds the tests' tolerance.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from golden_run import TOLERANCE, run
from tiny_families import FAMILY_CASES, golden


def limits(name: str) -> dict[str, int]:
    """What a family's prompt needs."""
    tokens = FAMILY_CASES[name].tokens
    return {"context_window_size": tokens, "prefill_chunk_size": tokens, "max_batch_size": 1}


def compile_family(name: str, directory: Path, device: str, cuda_arch: str | None) -> None:
    """Write a converted directory with its library."""
    from kvq.compiler import compile_model
    from kvq.convert import convert_weight
    from kvq.gen_config import gen_config

    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = FAMILY_CASES[name].write(Path(scratch), golden(name)[1])
        convert_weight(checkpoint, "q0f32", directory)
        gen_config(checkpoint, "q0f32", directory, kv_quantization="none", **limits(name))
    compile_model(directory, directory / "lib.so", device=device, opt="O1", cuda_arch=cuda_arch)


def largest_difference(name: str, directory: Path, device: str) -> float:
    """Of the prompt in one step, and of parts of it with single rows between them."""
    from kvq.runtime.loaded_model import load_model

    model = load_model(directory / "lib.so", directory, device=device, **limits(name))
    expected, _ = golden(name)
    tokens = expected["tokens"]
    worst = 0.0
    for chunks in ([len(tokens)], [len(tokens) // 2, 1, 1]):
        found = run(model, tokens, chunks)[expected["rows"]]
        worst = max(worst, float(np.abs(found - expected["logits"]).max()))
    return worst


def main() -> None:
    """Compile, or run and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["compile", "run"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--cuda-arch", help="with compile, such as sm_90a")
    args = parser.parse_args()
    failed = False
    for name in FAMILY_CASES:
        directory = args.directory / name
        if args.what == "compile":
            compile_family(name, directory, args.device, args.cuda_arch)
            continue
        difference = largest_difference(name, directory, args.device)
        failed |= not difference < TOLERANCE
        print(f"{name:>10} {difference:.1e}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
