"""``kvq serve``: an OpenAI-compatible server for many users."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from kvq.cli.chat import add_engine_options

NAME = "serve"

_EXAMPLE = """example:
  kvq serve smollm2 --port 8000
  kvq serve ./out --mode server --memory 48GB --api-key SECRET
"""


def add_parser(subparsers: Any) -> None:
    """Add the command to ``kvq``."""
    parser = subparsers.add_parser(
        NAME,
        usage="kvq serve [options] MODEL",
        help="an OpenAI-compatible server for many users",
        description="Serve a model from any stage over OpenAI's protocol; a status page is at /.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="smollm2, .gguf, checkpoint, or converted directory")
    add_engine_options(parser)
    add_batch_options(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", metavar="H", help="0.0.0.0 for all interfaces (default: %(default)s)")
    add("--port", type=int, default=8000, metavar="N", help="default: %(default)s; 0 takes a free one")
    add("--model-id", metavar="NAME", help="name that clients use (default: the last part of MODEL)")
    add("--api-key", metavar="KEY", help="clients must send it as Authorization: Bearer KEY")
    add("--max-body-bytes", type=int, default=8 << 20, metavar="N", help="default: %(default)s")
    add(
        "--drain-seconds",
        type=float,
        default=30,
        metavar="S",
        help="what running requests get when the server is asked to stop (default: %(default)s)",
    )
    parser.set_defaults(func=run)


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """Options that say how many requests run at once, and in how much memory."""
    add = parser.add_argument
    add(
        "--max-num-sequence",
        type=int,
        metavar="N",
        help="most requests at once (default: by mode, memory)",
    )
    add("--memory", metavar="SIZE", help="for weights, cache and workspace together, such as 48GB")
    add("--gpu-memory-utilization", type=float, metavar="F", help="the same as a part of what is available")
    add(
        "--mode",
        choices=("local", "interactive", "server"),
        default="local",
        help="local: a few requests; interactive: one; server: as many as fit (default: %(default)s)",
    )
    add("--no-prefix-cache", action="store_true", help="compute every prompt anew")


def batch_options(args: argparse.Namespace) -> dict[str, Any]:
    """What :func:`add_engine_options` and :func:`add_batch_options` describe, for an engine."""
    names = (
        *("quantization", "kv_quantization", "context_window_size", "prefill_chunk_size", "device"),
        *("model_lib", "opt", "activations", "max_num_sequence", "memory", "gpu_memory_utilization", "mode"),
    )
    return {name: getattr(args, name) for name in names} | {"prefix_cache": not args.no_prefix_cache}


def run(args: argparse.Namespace) -> int:
    """Run ``kvq serve``."""
    from kvq.cli.tables import error_console
    from kvq.engine import AsyncEngine
    from kvq.errors import ConfigError

    try:
        from kvq.serve.app import ServerOptions, default_model_id
        from kvq.serve.run import bind, serve, url_of
    except ImportError as problem:
        raise ConfigError(f"kvq serve needs the package {problem.name}: pip install 'kvq[serve]'") from None
    logging.getLogger("kvq").setLevel(logging.INFO)
    listener = bind(args.host, args.port)
    with error_console().status("preparing") as status:
        engine = AsyncEngine(args.model, report=status.update, **batch_options(args))
    model_id = args.model_id or default_model_id(args.model)
    options = ServerOptions(model_id, args.api_key, args.max_body_bytes)
    url = url_of(listener)
    print(f"serving {model_id} at {url}/v1 (status page {url}/, metrics {url}/metrics)", flush=True)
    serve(engine, options, listener, args.drain_seconds)
    return 0
