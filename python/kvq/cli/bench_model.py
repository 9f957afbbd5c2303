"""Options of ``kvq bench`` that say which model is measured, and how it is compiled."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvq.bench.run import BenchSetup


def add_model(parser: argparse.ArgumentParser, devices: Sequence[str]) -> None:
    """Add the options; the first device is the default."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="smollm2, a .gguf file, a checkpoint, or a converted directory")
    add("--quantization", metavar="Q", help="weight scheme (default: the model's own, else q4f16_1)")
    add("--opt", default="O2", help="optimization level (default: %(default)s)")
    add(
        "--activations",
        metavar="DTYPE",
        default="auto",
        help="what CUDA's tensor cores take at O2: auto, float16 or bfloat16 (default: %(default)s)",
    )
    add("--device", default=devices[0], choices=devices, help="default: %(default)s")
    add(
        "--random-weights",
        action="store_true",
        help="MODEL is a shape such as llama-3-8b; its weights are made up on the device",
    )
    add("--libraries", metavar="DIR", help="libraries of the shape, which --compile-only has written")
    add("--compile-only", action="store_true", help="compile the shape into --libraries, no GPU needed")
    add("--cuda-arch", metavar="LIST", help="with --compile-only, such as sm_90a")


def numbers(text: str, flag: str) -> list[int]:
    """Read ``128,2048``.

    Raises
    ------
    ConfigError
        If something in it is no whole number.
    """
    from kvq.errors import ConfigError

    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found:
        raise ConfigError(f"{flag} {text!r}: give whole numbers separated by commas, such as 128,2048")
    return found


def bench_setup(args: argparse.Namespace, schemes: Sequence[str], peers: Sequence[str] = ()) -> BenchSetup:
    """What is measured, of the options and the cache schemes.

    Raises
    ------
    ConfigError
        If options do not go together.
    """
    from kvq.bench.run import BenchSetup
    from kvq.errors import ConfigError

    if (args.libraries or args.compile_only) and not (args.random_weights and args.libraries):
        raise ConfigError("--libraries goes with --random-weights, --compile-only with both")
    if args.cuda_arch is not None and not args.compile_only:
        raise ConfigError("--cuda-arch goes with --compile-only: what is measured is compiled for this GPU")
    return BenchSetup(
        args.model,
        schemes,
        args.quantization,
        args.opt,
        args.activations,
        args.device,
        args.random_weights,
        Path(args.libraries) if args.libraries else None,
        peers,
    )


def compile_libraries(
    args: argparse.Namespace, setup: BenchSetup, most_tokens: int, report: Callable[[str], None]
) -> None:
    """Write the libraries of a shape, for sequences of ``most_tokens`` tokens, and print their names."""
    from kvq.bench.shape import compile_shape
    from kvq.build import DEFAULT_QUANTIZATION

    assert setup.libraries is not None, "bench_setup has refused that"
    for path in compile_shape(
        setup.libraries,
        setup.model,
        setup.quantization or DEFAULT_QUANTIZATION,
        setup.schemes,
        most_tokens,
        device=setup.device,
        cuda_arch=args.cuda_arch,
        opt=setup.opt,
        activations=setup.activations,
        report=report,
    ):
        print(path)
