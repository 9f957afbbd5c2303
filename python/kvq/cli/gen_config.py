"""``kvq gen_config``: parses, and says what was written."""

from __future__ import annotations

import argparse
import sys
from typing import Any

NAME = "gen_config"


def add_parser(subparsers: Any) -> None:
    """Add the command to ``kvq``."""
    parser = subparsers.add_parser(
        NAME,
        help="write the configuration and tokenizer of a model",
        description="Write mlc-chat-config.json and the tokenizer files of a checkpoint.",
        epilog="example:\n  kvq gen_config ./SmolLM2-135M-Instruct --quantization q4f16kv -o ./smollm2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="Hugging Face directory, .gguf, HF://org/name or smollm2"
    )
    parser.add_argument(
        "--quantization",
        "-q",
        metavar="Q",
        help="weight scheme or alias: source, q4f16kv, q3f16kv ... (default: source for GGUF, AWQ and GPTQ, "
        "else q4f16kv)",
    )
    parser.add_argument("--output", "-o", required=True, metavar="OUT", help="directory to write to")
    parser.add_argument(
        "--kv-quantization", metavar="K", help="cache scheme: none, int8, int4, int3, or k=int4:v=int3"
    )
    parser.add_argument(
        "--context-window-size",
        type=int,
        metavar="N",
        help="most tokens of a sequence (default: the model's)",
    )
    parser.add_argument(
        "--prefill-chunk-size", type=int, metavar="N", help="most tokens of a prefill step (default: 2048)"
    )
    parser.add_argument("--max-batch-size", type=int, metavar="N", help="most sequences (default: 128)")
    parser.add_argument(
        "--conv-template",
        metavar="NAME",
        help="chat template: chatml (also Qwen), llama-2, llama-3, mistral, gemma, phi-3, plain, or "
        "checkpoint (default: the checkpoint's own)",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Write the configuration."""
    from kvq.gen_config import gen_config
    from kvq.model.rope import describe_fixed_rope
    from kvq.model_source import resolve_model

    chat = gen_config(
        resolve_model(args.model),
        args.quantization,
        args.output,
        kv_quantization=args.kv_quantization,
        context_window_size=args.context_window_size,
        prefill_chunk_size=args.prefill_chunk_size,
        max_batch_size=args.max_batch_size,
        conv_template=args.conv_template,
    )
    print(
        f"{args.output}: {chat.model_type}, weights {chat.quantization}, cache {chat.kv_quantization}, "
        f"context {chat.context_window_size}, stops at {chat.stop_token_ids + chat.stop_strings}",
        file=sys.stderr,
    )
    if note := describe_fixed_rope(chat.model, chat.context_window_size):
        print(f"{args.output}: {note}", file=sys.stderr)
    return 0
