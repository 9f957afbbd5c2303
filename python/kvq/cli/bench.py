"""``kvq bench``: tokens per second of the cache schemes, side by side; and of a server."""

from __future__ import annotations

import argparse
import json
from typing import Any

from kvq.cli import bench_attention, bench_products, bench_serve
from kvq.cli.bench_model import add_model, bench_setup, compile_libraries, numbers

NAME = "bench"

_EXAMPLE = """example:
  kvq bench decode smollm2 --context 128,2048,8000 --kv none,int4,int3
  kvq bench prefill smollm2 --tokens 128,2048 --json
  kvq bench decode llama-3-8b --random-weights --device cuda --context 1024,8192 --batch 1,64 --peer torch
  kvq bench serve smollm2 --clients 16
  kvq bench attention --device cuda
  kvq bench products llama-3-8b --random-weights
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
    bench_products.add_kind(kinds)


def _add_kind(kinds: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(
        name,
        help=text,
        description=f"Measures {text}; rounds take turns, medians are reported.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser, ["cpu", "cuda", "vulkan"])
    parser.add_argument(
        "--kv", metavar="LIST", default="none,int4,int3", help="cache schemes (default: %(default)s)"
    )
    parser.add_argument(
        "--peer", metavar="LIST", help="beside PyTorch on the same shape, in fp16: torch, torch-compile"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the speeds: .png, .svg or .pdf")
    parser.add_argument("--csv", metavar="FILE", help="write the figures as CSV")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run ``kvq bench decode`` or ``kvq bench prefill``."""
    from kvq.bench.run import bench_decode, bench_prefill
    from kvq.bench.step_peers import check_peers
    from kvq.bench.step_plot import check_plot, plot_rates, write_csv
    from kvq.cli.tables import error_console
    from kvq.compare import parse_schemes

    at = "context" if args.kind == "decode" else "tokens"
    sizes = numbers(getattr(args, at), f"--{at}")
    peers = [name.strip() for name in (args.peer or "").split(",") if name.strip()]
    check_peers(peers)
    if args.plot:
        check_plot(args.plot)
    setup = bench_setup(args, parse_schemes(args.kv), peers)
    with error_console().status("") as status:
        if args.compile_only:
            compile_libraries(args, setup, max(sizes) + getattr(args, "steps", 0), status.update)
            return 0
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
