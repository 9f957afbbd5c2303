"""``kvq bench serve``: throughput and latency of a server under load."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from kvq.cli.chat import add_engine_options
from kvq.cli.serve import add_batch_options, batch_options

_EXAMPLE = """example:
  kvq bench serve smollm2 --clients 16 --memory 1GB
  kvq bench serve --url http://127.0.0.1:8000 --clients 64 --shared-part 0.9 --plot load.svg
  kvq bench serve smollm2 --peer http://127.0.0.1:8001   (vLLM, LMDeploy, llama.cpp's server, another kvq)
"""


def add_kind(kinds: Any) -> None:
    """Add ``serve`` to ``kvq bench``."""
    text = "throughput, time to first token and between tokens, prefix hits, of a server under load"
    parser: argparse.ArgumentParser = kinds.add_parser(
        "serve",
        help=text,
        description=f"Measures {text}. Requests are made from a seed, with lengths as in ShareGPT.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="served in this process, on a free port")
    add("--url", metavar="URL", help="a running server instead of MODEL")
    add("--api-key", metavar="KEY", help="what that server wants")
    add("--peer", metavar="URLS", help="other servers that get the same requests afterwards, with commas")
    add("--peer-api-key", metavar="KEY", help="what these want")
    add(
        "--clients",
        type=int,
        default=16,
        metavar="N",
        help="requests under way at once (default: %(default)s)",
    )
    add("--requests", type=int, default=64, metavar="N", help="in all (default: %(default)s)")
    add(
        "--shared-part",
        type=float,
        default=0.5,
        metavar="F",
        help="begin with a shared prefix (default: %(default)s)",
    )
    add("--prefixes", type=int, default=2, metavar="N", help="shared prefixes (default: %(default)s)")
    add("--prefix-tokens", type=int, default=512, metavar="N", help="of each (default: %(default)s)")
    add("--most-prompt-tokens", type=int, default=1024, metavar="N", help="default: %(default)s")
    add("--most-answer-tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    add("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    add("--json", action="store_true", help="print a JSON object")
    add("--plot", metavar="FILE", help="write distributions of the times: .svg, .png or .pdf")
    add_engine_options(parser)
    add_batch_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run ``kvq bench serve``."""
    from kvq.cli.tables import error_console
    from kvq.errors import ConfigError

    try:
        from kvq.bench.serve import Load, bench_serve, check_server
        from kvq.bench.serve_peers import parse_peers
    except ImportError as problem:
        raise ConfigError(
            f"kvq bench serve needs the package {problem.name}: pip install 'kvq[serve]'"
        ) from None
    if (args.model is None) == (args.url is None):
        raise ConfigError("kvq bench serve takes a MODEL or --url: give one of them")
    load = Load(
        requests=args.requests,
        clients=args.clients,
        shared_part=args.shared_part,
        prefixes=args.prefixes,
        prefix_tokens=args.prefix_tokens,
        most_prompt_tokens=args.most_prompt_tokens,
        most_answer_tokens=args.most_answer_tokens,
        seed=args.seed,
    )
    peers = parse_peers(args.peer)
    if args.plot:
        from kvq.eval.plots import check

        check()
    with error_console().status("") as status:
        for peer in peers:
            check_server(peer, args.peer_api_key)
        with _server(args, status.update) as url:
            results = [bench_serve(url, load, api_key=args.api_key, report=status.update)]
        for peer in peers:
            results.append(bench_serve(peer, load, api_key=args.peer_api_key, report=status.update))
    figures = [result.to_dict() for result in results]
    if args.json:
        print(json.dumps({**figures[0], "peers": figures[1:]} if peers else figures[0], indent=2))
    else:
        _print(args.model or args.url, figures[0])
        if peers:
            _print_peers(args.model or args.url, figures)
    if args.plot:
        from kvq.bench.serve_plot import plot_serve

        plot_serve(results, args.plot)
    return 0


@contextlib.contextmanager
def _server(args: argparse.Namespace, say: Callable[[str], None]) -> Iterator[str]:
    """The address of the server to load: a running one, or one of this process."""
    if args.url is not None:
        yield args.url
        return
    from kvq.engine import AsyncEngine
    from kvq.serve.app import ServerOptions, default_model_id
    from kvq.serve.run import ServerThread

    engine = AsyncEngine(args.model, report=say, **batch_options(args))
    try:
        with ServerThread(engine, ServerOptions(default_model_id(args.model), args.api_key)) as server:
            yield server.url
    finally:
        engine.shutdown()


def _print(name: str, figures: dict[str, Any]) -> None:
    from kvq.cli.tables import print_table

    pages, hits = figures["peak_pages"], figures["hit_rate"]
    print_table(
        f"{name}: {figures['requests']} requests of {figures['clients']} clients, seed {figures['seed']}",
        ["figure", "value"],
        [
            ["seconds", f"{figures['seconds']:.1f}"],
            ["requests per second", f"{figures['requests_per_second']:.2f}"],
            ["answer tokens per second", f"{figures['answer_tokens_per_second']:.1f}"],
            ["prompt tokens", str(figures["prompt_tokens"])],
            ["answer tokens", str(figures["answer_tokens"])],
            ["prompt tokens from the prefix cache", "unknown" if hits is None else f"{100 * hits:.1f}%"],
            ["most pages in use", "unknown" if pages is None else f"{pages} of {figures['total_pages']}"],
            ["errors", str(figures["errors"])],
        ],
    )
    rows = []
    for key, text in (
        ("first_token", "first token"),
        ("first_token_shared", "first token, shared prefix"),
        ("first_token_unshared", "first token, own prompt"),
        ("inter_token", "next token"),
    ):
        values = [figures[f"{key}_p{percent}"] for percent in (50, 95, 99)]
        rows.append([text, *("-" if value is None else f"{1000 * value:.1f}" for value in values)])
    print_table("milliseconds", ["time to", "p50", "p95", "p99"], rows)


def _print_peers(name: str, figures: list[dict[str, Any]]) -> None:
    from kvq.bench.serve_peers import comparison
    from kvq.cli.tables import print_table

    heads = [head for one in figures[1:] for head in (one["url"], "ratio")]
    print_table(
        f"the same requests, one server after another; ratios are to {name}",
        ["figure", name, *heads],
        comparison(figures),
    )
