"""``kvq bench``: tokens per second of the cache schemes, side by side; and of a server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvq.cli import bench_attention, bench_serve

NAME = "bench"

_EXAMPLE = """example:
  kvq bench decode smollm2 --context 128,2048,8000 --kv none,int4,int3
  kvq bench prefill smollm2 --tokens 128,2048 --json
  kvq bench decode llama-3-8b --random-weights --device cuda --context 1024,8192 --batch 1,64 --peer torch
  kvq bench serve smollm2 --clients 16
  kvq bench attention --device cuda
"""


def add_parser(subparsers: Any) -> None:
    """Add the command to ``kvq``."""
    parser = subparsers.add_parser(
        NAME,
        help="speed of the cache schemes, side by side in one run; of a server under load",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    decode = _add_kind(kinds, "decode", "tokens per second of whole decode steps, greedy sampling included")
    decode.add_argument(
        "--context", metavar="LIST", default="128,2048", help="tokens in the cache (default: %(default)s)"
    )
    decode.add_argument(
        "--batch", metavar="LIST", default="1", help="sequences at once, at every context (default: 1)"
    )
    decode.add_argument("--steps", metavar="N", type=int, default=32, help="steps of a round (default: 32)")
    decode.add_argument("--rounds", metavar="N", type=int, default=5, help="default: %(default)s")
    prefill = _add_kind(kinds, "prefill", "tokens per second of a prompt's prefill")
    prefill.add_argument(
        "--tokens", metavar="LIST", default="128,2048", help="tokens of the prompt (default: %(default)s)"
    )
    prefill.add_argument("--chunk", metavar="N", type=int, help="tokens of a step (default: the library's)")
    prefill.add_argument("--rounds", metavar="N", type=int, default=3, help="default: %(default)s")
    bench_serve.add_kind(kinds)
    bench_attention.add_kind(kinds)


def _add_kind(kinds: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(
        name,
        help=text,
        description=f"Measures {text}; rounds take turns, medians are reported.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="smollm2, a .gguf file, a checkpoint, or a converted directory"
    )
    parser.add_argument(
        "--quantization", metavar="Q", help="weight scheme (default: the model's own, else q4f16_1)"
    )
    parser.add_argument(
        "--kv", metavar="LIST", default="none,int4,int3", help="cache schemes (default: %(default)s)"
    )
    parser.add_argument("--opt", default="O2", help="optimization level (default: %(default)s)")
    devices = ["cpu", "cuda", "vulkan"]
    parser.add_argument("--device", default="cpu", choices=devices, help="default: %(default)s")
    parser.add_argument(
        "--random-weights",
        action="store_true",
        help="MODEL is a shape such as llama-3-8b; its weights are made up on the device",
    )
    parser.add_argument(
        "--libraries", metavar="DIR", help="libraries of the shape, which --compile-only has written"
    )
    parser.add_argument(
        "--compile-only", action="store_true", help="compile the shape into --libraries, no GPU needed"
    )
    parser.add_argument("--cuda-arch", metavar="LIST", help="with --compile-only, such as sm_90a")
    parser.add_argument(
        "--peer", metavar="LIST", help="beside PyTorch on the same shape, in fp16: torch, torch-compile"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the speeds: .png, .svg or .pdf")
    parser.add_argument("--csv", metavar="FILE", help="write the figures as CSV")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.set_defaults(func=run)
    return parser


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


def run(args: argparse.Namespace) -> int:
    """Run ``kvq bench decode`` or ``kvq bench prefill``."""
    from kvq.bench.run import BenchSetup, bench_decode, bench_prefill
    from kvq.bench.step_peers import check_peers
    from kvq.bench.step_plot import check_plot, plot_rates, write_csv
    from kvq.cli.tables import error_console
    from kvq.compare import parse_schemes
    from kvq.errors import ConfigError

    if (args.libraries or args.compile_only) and not (args.random_weights and args.libraries):
        raise ConfigError("--libraries goes with --random-weights, --compile-only with both")
    at = "context" if args.kind == "decode" else "tokens"
    sizes = numbers(getattr(args, at), f"--{at}")
    peers = [name.strip() for name in (args.peer or "").split(",") if name.strip()]
    check_peers(peers)
    if args.plot:
        check_plot(args.plot)
    setup = BenchSetup(
        args.model,
        parse_schemes(args.kv),
        args.quantization,
        args.opt,
        args.device,
        args.random_weights,
        Path(args.libraries) if args.libraries else None,
        peers,
    )
    with error_console().status("") as status:
        if args.compile_only:
            return _compile(args, setup, max(sizes), status.update)
        if args.kind == "decode":
            batches = numbers(args.batch, "--batch")
            rows = bench_decode(
                setup, sizes, batches, steps=args.steps, rounds=args.rounds, report=status.update
            )
        else:
            rows = bench_prefill(setup, sizes, chunk=args.chunk, rounds=args.rounds, report=status.update)
    if args.csv:
        write_csv(rows, args.csv)
    if args.plot:
        plot_rates(rows, args.plot)
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        _print(f"{args.kind}, {args.model}", ["batch", "context"] if at == "context" else [at], rows)
    return 0


def _compile(args: argparse.Namespace, setup: Any, most_tokens: int, report: Callable[[str], None]) -> int:
    """Write the libraries and their names."""
    from kvq.bench.shape import compile_shape
    from kvq.build import DEFAULT_QUANTIZATION

    for path in compile_shape(
        setup.libraries,
        setup.model,
        setup.quantization or DEFAULT_QUANTIZATION,
        setup.schemes,
        most_tokens + getattr(args, "steps", 0),
        device=setup.device,
        cuda_arch=args.cuda_arch,
        opt=setup.opt,
        report=report,
    ):
        print(path)
    return 0


def _describe_device(row: dict[str, Any]) -> str:
    return f"{row['threads']} " + ("threads" if row["device"] == "cpu" else "multiprocessors")


def _print(title: str, at: list[str], rows: list[dict[str, Any]]) -> None:
    from kvq.cli.tables import print_table

    first = rows[0]
    print_table(
        f"{title}: weights {first['quantization']}, {first['opt']}, activations {first['activations']}, "
        f"{_describe_device(first)}, "
        f"median of {first['rounds']} rounds",
        [*at, "kv", "tokens/s", "slowest", "fastest", f"vs {first['kv']}"],
        [
            [
                *(str(row[name]) for name in at),
                row["kv"],
                f"{row['tokens_per_second']:.1f}",
                f"{row['slowest']:.1f}",
                f"{row['fastest']:.1f}",
                f"{row['ratio']:.2f}x",
            ]
            for row in rows
        ],
    )
