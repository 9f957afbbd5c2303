"""``kvq compile``: a configuration into a library for one device."""

from __future__ import annotations

import argparse
import sys
from typing import Any

NAME = "compile"

_EXAMPLE = """example:
  kvq compile ./out/mlc-chat-config.json --device cpu -o ./out/lib.so
  kvq compile ./out/mlc-chat-config.json -o ./out/lib.so --overrides "context_window_size=4096"
"""


def add_parser(subparsers: Any) -> None:
    """Add the command to ``kvq``."""
    parser = subparsers.add_parser(
        NAME,
        help="compile a model for a device",
        description="Compile what mlc-chat-config.json describes into a self-describing library.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("config", metavar="CONFIG", help="mlc-chat-config.json, or the directory that holds it")
    add("--output", "-o", metavar="LIB", help="library to write (default: lib.so beside the configuration)")
    add("--device", default="cpu", metavar="D", help="default: %(default)s")
    add("--opt", default="O2", metavar="O", help="O0 .. O3; O1 has exact activations (default: %(default)s)")
    add("--overrides", metavar='"A=1;B=2"', help="values that replace those of the configuration")
    add("--debug-dump", metavar="DIR", help="write the module after each phase of compilation")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run ``kvq compile``."""
    from pathlib import Path

    from kvq.cli.tables import error_console
    from kvq.compiler import compile_model
    from kvq.config import CHAT_CONFIG_NAME

    config = Path(args.config)
    if config.is_dir():
        config = config / CHAT_CONFIG_NAME
    output = Path(args.output) if args.output else config.with_name("lib.so")
    with error_console().status(f"compiling for {args.device}"):
        compile_model(
            config,
            output,
            device=args.device,
            opt=args.opt,
            overrides=args.overrides,
            debug_dump=args.debug_dump,
        )
    print(f"{output}: {output.stat().st_size / 2**20:.1f} MiB for {args.device}", file=sys.stderr)
    return 0
