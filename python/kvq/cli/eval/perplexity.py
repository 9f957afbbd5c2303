"""``kvq eval perplexity``: perplexity, divergence and agreement of each cache scheme on a text."""

from __future__ import annotations

import argparse
from typing import Any

from kvq.cli.eval.options import measure, show

_EXAMPLE = """example:
  kvq eval perplexity smollm2 --kv none,int8,int4,int3
  kvq eval perplexity ./out --text book.txt --window 2048 --max-tokens 16384 --json
  kvq eval perplexity smollm2 --quantization q0f16 --kv none,int4,peer:llama.cpp-q4_0-rotated --plot peers.svg
"""


def add_parser(kinds: Any) -> None:
    """Add the kind to ``kvq eval``."""
    parser = kinds.add_parser(
        "perplexity",
        help="perplexity, KL divergence and agreement on a text",
        description="Scores a text under each cache scheme, as it is served. The first row is the "
        "reference, a cache that rounds nothing; the others follow in the order of --kv. none is the floor: "
        "K and V merely rounded to the weights' dtype. peer:NAME is a format of others (--list-peers, or "
        "peer:all), whose pages go through a codec inside the library of the reference; with home:NAME every "
        "token does as soon as it is written, in steps of one token, which takes longer.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        nargs="?",
        help="smollm2, a .gguf file, a checkpoint, or a converted directory",
    )
    add("--quantization", metavar="Q", help="weight scheme (default: the model's own, else q4f16_1)")
    add("--kv", metavar="LIST", default="none,int8,int4,int3", help="cache schemes (default: %(default)s)")
    add("--reference", metavar="K", default="float32", help="scheme of the first row (default: %(default)s)")
    add("--text", metavar="FILE", default="opticks", help="UTF-8 text (default: prose that ships with kvq)")
    add("--max-tokens", metavar="N", type=int, default=12288, help="tokens to read (default: %(default)s)")
    add("--window", metavar="N", type=int, default=1024, help="tokens of a window (default: %(default)s)")
    add("--stride", metavar="N", type=int, help="tokens between windows (default: the window)")
    add("--chunk", metavar="N", type=int, default=256, help="tokens of a prefill step (default: %(default)s)")
    add("--opt", default="O1", help="O1 computes with exact activations (default: %(default)s)")
    add("--json", action="store_true", help="print a JSON list, an object a scheme")
    add("--plot", metavar="FILE", help="KL and perplexity over bits, as .svg, .png or .pdf")
    add("--list-peers", action="store_true", help="print the formats of others and what they store")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run ``kvq eval perplexity``."""
    from kvq.errors import ConfigError
    from kvq.eval.plots import plot_perplexity
    from kvq.eval.run import evaluate_perplexity, parse_columns
    from kvq.eval.tables import perplexity_table

    if args.list_peers:
        _print_peers()
        return 0
    if args.model is None:
        raise ConfigError(
            "kvq eval perplexity needs a MODEL: smollm2, a checkpoint, or a converted directory"
        )
    schemes = parse_columns(args.kv, args.reference)
    rows = measure(
        lambda progress, report: evaluate_perplexity(
            args.model,
            schemes,
            args.text,
            quantization=args.quantization,
            opt=args.opt,
            max_tokens=args.max_tokens,
            window=args.window,
            stride=args.stride,
            chunk=args.chunk,
            progress=progress,
            report=report,
        ),
        "scoring",
    )
    if args.plot:
        plot_perplexity(rows, args.plot)
    show(args, rows, perplexity_table)
    return 0


def _print_peers() -> None:
    from kvq.eval.codecs import PEER_PREFIX, PEERS

    print(f"{'--kv':34}{'bits per value at head_dim 64':>32}{'128':>8}  format")
    for name, codec in PEERS.items():
        bits, common = (codec.bits_per_value(dim) for dim in (64, 128))
        print(f"{PEER_PREFIX + name:34}{bits:32.3f}{common:8.3f}  {codec.description}")
