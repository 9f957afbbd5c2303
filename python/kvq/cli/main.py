"""``kvq``: finds the subcommand, runs it, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from kvq import __version__
from kvq.errors import KvqError

#: Modules of the subcommands, in the order in which ``kvq --help`` lists them.
COMMANDS = {
    "demo": "demo",
    "chat": "chat",
    "serve": "serve",
    "convert_weight": "convert_weight",
    "gen_config": "gen_config",
    "compile": "compile",
    "plan": "plan",
    "inspect": "inspect",
    "eval": "eval",
    "bench": "bench",
}

_EPILOG = """example:
  kvq demo                                          a real model, from download to answer
  kvq chat ./model.gguf --quantization q4f16kv      talk to a checkpoint
  kvq COMMAND --help                                what a command takes
"""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line, like every other mistake."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")


def build_parser(names: Sequence[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The parser with the subcommands ``names``; only their modules are imported."""
    parser = _Parser(
        prog="kvq",
        description="Open LLM checkpoints compiled into small libraries with a 4-bit or 3-bit KV cache.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvq {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in names:
        importlib.import_module(f"kvq.cli.{COMMANDS[name]}").add_parser(subparsers)
    _add_debug(parser)
    return parser


def _add_debug(parser: argparse.ArgumentParser) -> None:
    """``--debug`` is taken before and after the subcommand."""
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks and log in full"
    )
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in {id(child): child for child in action.choices.values()}.values():
                _add_debug(child)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns
    -------
    int
        0; 2 for a mistake of the user's, with one line on stderr; 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    at = next((i for i, word in enumerate(words) if not word.startswith("-")), None)
    named = words[at].replace("-", "_") if at is not None else ""
    if at is not None and named in COMMANDS:
        words[at] = named
        parser = build_parser([named])
    else:
        parser = build_parser()
    args = parser.parse_args(words)
    debug = getattr(args, "debug", False)
    logging.basicConfig(format="%(message)s", level=logging.DEBUG if debug else logging.WARNING)
    try:
        code: Any = args.func(args)
        sys.stdout.flush()
        return int(code)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader left. What is still buffered must not fail again at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (KvqError, OSError) as error:
        if debug:
            raise
        print(f"kvq: error: {_one_line(error)}", file=sys.stderr)
        return 2


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
