"""``kvq convert_weight``: parses, and shows progress."""

from __future__ import annotations

import argparse
from typing import Any

NAME = "convert_weight"


def add_parser(subparsers: Any) -> None:
    """Add the command to ``kvq``."""
    parser = subparsers.add_parser(
        NAME,
        help="convert the weights of a checkpoint",
        description="Convert the weights of a checkpoint into params_shard_*.bin and tensor-cache.json.",
        epilog="example:\n  kvq convert_weight ./SmolLM2-135M-Instruct --quantization q4f16_1 -o ./smollm2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="Hugging Face directory, .gguf, HF://org/name or smollm2"
    )
    parser.add_argument(
        "--quantization",
        "-q",
        metavar="Q",
        help="weight scheme: source, q0f16, q0f32, q4f16_1, or an alias such as q4f16kv (default: source for "
        "GGUF, AWQ and GPTQ, else q4f16kv)",
    )
    parser.add_argument("--output", "-o", required=True, metavar="OUT", help="directory to write to")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Convert, with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from kvq.convert import convert_weight
    from kvq.model_source import resolve_model

    console = Console(stderr=True)
    model = resolve_model(args.model)
    with Progress(
        TextColumn("converting"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", style="dim"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=None)
        num_bytes = convert_weight(
            model,
            args.quantization,
            args.output,
            progress=lambda done, total, name: bar.update(
                task, completed=done, total=total, description=name
            ),
        )
    console.print(f"{args.output}: {num_bytes / 2**20:.1f} MiB of weights", highlight=False)
    return 0
