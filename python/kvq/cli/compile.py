"""``kvq compile``: a chat configuration to a library."""

from __future__ import annotations

import argparse
import sys

NAME = "compile"

_EXAMPLE = """example:
  kvq compile dist/smollm2/mlc-chat-config.json --opt O2 -o dist/smollm2/lib.so
  kvq compile dist/smollm2 --device cuda --cuda-arch sm_80,sm_90 -o dist/smollm2/lib-cuda.so
  kvq compile dist/smollm2 --device metal:macos-arm64 -o dist/smollm2/lib-metal
  kvq compile --list-devices
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        NAME,
        help="compile a configuration to a library",
        description="Compile a converted model to a self-describing library.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", help="mlc-chat-config.json, or the directory that holds it")
    parser.add_argument(
        "-o",
        "--output",
        help="library to write (default: lib beside the configuration, with the host's suffix)",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="what to compile for: cpu, cuda, metal, vulkan, opencl or webgpu, also with a host: "
        "cpu:linux-aarch64, metal:macos-arm64, vulkan:windows-x86_64 (default: cpu, this machine's host)",
    )
    parser.add_argument("--host", help="the host alone, e.g. linux-aarch64")
    parser.add_argument(
        "--mcpu",
        metavar="LEVEL",
        help="oldest x86-64 CPU: x86-64, x86-64-v3, x86-64-v4 (default: this machine's, else x86-64-v3)",
    )
    parser.add_argument(
        "--list-devices",
        action="store_true",
        help="show what can be compiled for and run here, and what is missing",
    )
    parser.add_argument(
        "--cuda-arch",
        metavar="LIST",
        help="GPU architectures, e.g. sm_80,sm_90, or sm_90a for Hopper alone "
        "(default: this machine's, or sm_80,sm_89,sm_90)",
    )
    parser.add_argument(
        "--opt", default="O2", help="O0 plain code, O1 exact activations, O2 rounded activations, O3 as O2"
    )
    parser.add_argument(
        "--activations",
        metavar="DTYPE",
        default="auto",
        help="what CUDA's tensor cores take at O2: float16, or bfloat16 of the same range as float32 "
        "(default: auto, bfloat16 for Gemma)",
    )
    parser.add_argument("--overrides", help='e.g. "context_window_size=4096;kv_quantization=int3"')
    parser.add_argument("--debug-dump", metavar="DIR", help="write the module after each pass")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand."""
    if args.list_devices:
        _print_devices()
        return 0
    from pathlib import Path

    from kvq.compiler import compile_model
    from kvq.compiler.compile import parse_overrides
    from kvq.config import ChatConfig
    from kvq.errors import ConfigError
    from kvq.model.rope import describe_fixed_rope

    if args.config is None:
        raise ConfigError("which model? name its mlc-chat-config.json, or the directory that holds it")
    config = Path(args.config)
    directory = config if config.is_dir() else config.parent
    output = compile_model(
        config,
        args.output or directory / "lib",
        device=args.device,
        host=args.host,
        mcpu=args.mcpu,
        cuda_arch=args.cuda_arch,
        opt=args.opt,
        activations=args.activations,
        overrides=args.overrides,
        debug_dump=args.debug_dump,
    )
    chat = ChatConfig.load(config)
    context = parse_overrides(args.overrides).get("context_window_size", chat.context_window_size)
    if note := describe_fixed_rope(chat.model, context):
        print(f"{output}: {note}", file=sys.stderr)
    if args.output and Path(args.output) != output and Path(args.output).suffix:
        print(f"{output}: named as the host's shared libraries are", file=sys.stderr)
    print(output)
    return 0


def _print_devices() -> None:
    from kvq.devices import list_devices

    from .tables import print_table

    rows = [(found.name, found.compiles, found.runs) for found in list_devices()]
    print_table("Devices", ("--device", "compiles here", "runs here"), rows, texts=3)
