"""``kvq bench attention``: decode attention of one layer on a GPU, beside other libraries."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

_EXAMPLE = """example:
  kvq bench attention --device cuda
  kvq bench attention --device cuda --kv int4,none --shape 64x8192,64x2048h --peer torch
  kvq bench attention --compile-only --cuda-arch sm_90a --kernels DIR   (no GPU needed here)
"""


def add_kind(kinds: Any) -> None:
    """Add the kind to ``kvq bench``."""
    text = "decode attention of one layer on a GPU, against a copy within its memory"
    parser: argparse.ArgumentParser = kinds.add_parser(
        "attention",
        help=text,
        description=f"Measures {text}. Results are checked first.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", choices=["cuda"], help="default: %(default)s")
    parser.add_argument(
        "--kv", metavar="LIST", default="int4,int3,none", help="cache schemes (default: %(default)s)"
    )
    parser.add_argument(
        "--shape",
        metavar="LIST",
        help="BATCHxLENGTH, with h for half-full open pages, r for ragged lengths (default: eight shapes)",
    )
    parser.add_argument(
        "--heads", metavar="N", type=int, default=32, help="query heads (default: %(default)s)"
    )
    parser.add_argument("--kv-heads", metavar="N", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--head-dim", metavar="N", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--page-size", metavar="N", type=int, default=64, help="default: %(default)s")
    parser.add_argument(
        "--peer", metavar="LIST", help="other libraries, if they are installed: torch, flashinfer, lmdeploy"
    )
    parser.add_argument(
        "--kernels", metavar="DIR", help="where compiled kernels are kept (default: a new folder)"
    )
    parser.add_argument(
        "--cuda-arch", metavar="LIST", help="with --compile-only: such as sm_90a (default: this GPU)"
    )
    parser.add_argument(
        "--compile-only", action="store_true", help="compile the kernels into --kernels, no GPU needed"
    )
    parser.add_argument(
        "--prefill",
        action="store_true",
        help="whole prompts instead of decode: 1x8192 is one of 8,192 tokens",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run ``kvq bench attention``."""
    import tempfile

    from kvq.bench import prefill_attention
    from kvq.bench.attention import DEFAULT_SHAPES, Geometry, bench_attention, compile_kernel, parse_shapes
    from kvq.cli.tables import error_console
    from kvq.errors import ConfigError
    from kvq.quantization.scheme import KVQuantization

    schemes = [KVQuantization.parse(name.strip()) for name in args.kv.split(",")]
    shapes = parse_shapes(
        args.shape or (prefill_attention.DEFAULT_SHAPES if args.prefill else DEFAULT_SHAPES)
    )
    geometry = Geometry(args.heads, args.kv_heads, args.head_dim)
    layouts = [geometry.layout(kv, args.page_size) for kv in schemes]
    if args.compile_only:
        if args.kernels is None:
            raise ConfigError("--compile-only needs --kernels DIR to put the kernels into")
        compile_one = prefill_attention.compile_prefill if args.prefill else compile_kernel
        for layout in layouts:
            compile_one(Path(args.kernels), layout, geometry.num_heads, args.cuda_arch)
        return 0
    if args.cuda_arch is not None:
        raise ConfigError("--cuda-arch goes with --compile-only: what is measured is compiled for this GPU")
    with tempfile.TemporaryDirectory() as scratch, error_console().status("") as status:
        kernels = Path(args.kernels or scratch)
        peers = [name.strip() for name in (args.peer or "").split(",") if name.strip()]
        measured = schemes, shapes, geometry, args.page_size, kernels, peers
        if args.prefill:
            return _show_prefill(prefill_attention.bench_prefill(*measured, report=status.update), args.json)
        figures, copy_rate = bench_attention(*measured, report=status.update)
    if args.json:
        print(
            json.dumps(
                {"copy_tb_per_s": copy_rate / 1e12, "figures": [f.to_dict() for f in figures]}, indent=2
            )
        )
    else:
        _print(figures, copy_rate)
    return 0


def _show_prefill(figures: list[Any], as_json: bool) -> int:
    from kvq.cli.tables import print_table

    if as_json:
        print(json.dumps({"figures": [f.to_dict() for f in figures]}, indent=2))
        return 0
    print_table(
        f"prefill attention, heads {figures[0].heads}",
        ["shape", "cache", "us a layer", "fastest", "slowest", "TFLOP/s", "error"],
        [
            [
                f.shape,
                f.kv,
                f"{f.us:.1f}",
                f"{f.fastest:.1f}",
                f"{f.slowest:.1f}",
                f"{f.tflops:.0f}",
                "" if f.error is None else f"{f.error:.1e}",
            ]
            for f in figures
        ],
    )
    return 0


def _print(figures: list[Any], copy_rate: float) -> None:
    from kvq.cli.tables import print_table

    print_table(
        f"decode attention, heads {figures[0].heads}; copy {copy_rate / 1e12:.2f} TB/s",
        ["shape", "cache", "us a layer", "fastest", "slowest", "TB/s", "of copy", "error"],
        [
            [
                f.shape,
                f.kv,
                f"{f.us:.1f}",
                f"{f.fastest:.1f}",
                f"{f.slowest:.1f}",
                f"{f.tb_per_s:.2f}",
                f"{f.of_copy:.0%}",
                "" if f.error is None else f"{f.error:.1e}",
            ]
            for f in figures
        ],
    )
