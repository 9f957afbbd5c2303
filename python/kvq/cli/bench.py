"""``kvq bench``: tokens per second of the cache schemes, side by side; and of a server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from kvq.cli import bench_attention, bench_serve

NAME = "bench"

_EXAMPLE = """example:
  kvq bench decode smollm2 --context 128,2048,8000 --kv none,int4,int3
  kvq bench prefill smollm2 --tokens 128,2048 --json
  kvq bench decode llama-3-8b --random-weights --device cuda --context 1024,131072 --kv int4,none
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
    decode.add_argument("--batch", metavar="N", type=int, default=1, help="sequences at once (default: 1)")
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
    from kvq.bench.run import bench_decode, bench_prefill
    from kvq.cli.tables import error_console
    from kvq.compare import parse_schemes

    schemes = parse_schemes(args.kv)
    common: dict[str, Any] = {
        "quantization": args.quantization,
        "opt": args.opt,
        "rounds": args.rounds,
        "device": args.device,
        "random_weights": args.random_weights,
    }
    measure: Callable[..., list[dict[str, Any]]]
    if args.kind == "decode":
        sizes, measure, at = numbers(args.context, "--context"), bench_decode, "context"
        common |= {"batch": args.batch, "steps": args.steps}
    else:
        sizes, measure, at = numbers(args.tokens, "--tokens"), bench_prefill, "tokens"
        common |= {"chunk": args.chunk}
    with error_console().status("") as status:
        rows = measure(args.model, schemes, sizes, **common, report=status.update)
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        _print(f"{args.kind}, {args.model}", at, rows)
    return 0


def _describe_device(row: dict[str, Any]) -> str:
    return f"{row['threads']} " + ("threads" if row["device"] == "cpu" else "multiprocessors")


def _print(title: str, at: str, rows: list[dict[str, Any]]) -> None:
    from kvq.cli.tables import print_table

    first = rows[0]
    print_table(
        f"{title}: weights {first['quantization']}, {first['opt']}, {_describe_device(first)}, "
        f"median of {first['rounds']} rounds",
        [at, "kv", "tokens/s", "slowest", "fastest", f"vs {first['kv']}"],
        [
            [
                str(row[at]),
                row["kv"],
                f"{row['tokens_per_second']:.1f}",
                f"{row['slowest']:.1f}",
                f"{row['fastest']:.1f}",
                f"{row['ratio']:.2f}x",
            ]
            for row in rows
        ],
    )
