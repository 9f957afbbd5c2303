"""``kvq plan``: the memory of a model and its cache, before anything is allocated."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvq.config import ModelConfig
    from kvq.memory import MemoryPlan
    from kvq.quantization.scheme import KVQuantization, WeightScheme
    from kvq.runtime.cache_shape import CacheShape

NAME = "plan"

_EXAMPLE = """example:
  kvq plan llama-3-8b --quantization q4f16kv --context-window-size 8192
  kvq plan llama-3-70b --quantization q4f16kv --context-window-size 2148 --batch 20 --memory 48GB
"""


def add_parser(subparsers: Any) -> None:
    """Add the command to ``kvq``."""
    parser = subparsers.add_parser(
        NAME,
        help="the memory plan, before anything is allocated",
        description="Weights, KV cache and activations in bytes, and how many tokens fit.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL_OR_PRESET", help="preset, checkpoint, .gguf file or converted directory")
    add(
        "--quantization",
        "-q",
        metavar="Q",
        help="weights, or an alias (default: the directory's, else q4f16kv)",
    )
    add("--kv-quantization", metavar="K", help="cache: none, int8, int4, int3, or k=int4:v=int3")
    add("--context-window-size", type=int, metavar="N", help="tokens of a sequence (default: the model's)")
    add(
        "--batch",
        "--max-batch-size",
        dest="batch",
        type=int,
        default=1,
        metavar="N",
        help="sequences (default: 1)",
    )
    add("--prefill-chunk-size", type=int, default=2048, metavar="N", help="rows of a step (default: 2048)")
    add("--device", default="cpu", metavar="D", help="cuda counts the driver's share, too (default: cpu)")
    add("--memory", metavar="SIZE", help="budget, such as 48GB: how many tokens and sequences fit")
    add("--json", action="store_true", help="print a JSON object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run ``kvq plan``."""
    from kvq.gen_config import DEFAULT_BATCH
    from kvq.memory import device_costs, kv_layout, plan_memory
    from kvq.memory_budget import fit_cache
    from kvq.runtime.cache_shape import unread_bytes
    from kvq.sizes import parse_size

    model, weights, kv = _find(args.model, args.quantization, args.kv_quantization)
    context = args.context_window_size or model.max_position_embeddings
    plan = plan_memory(model, weights, kv, context, args.batch, args.prefill_chunk_size, device=args.device)
    fields: dict[str, Any] = plan.to_dict()
    windows = [layer.window for layer in model.layer_attention]
    fields["kv_unread_bytes"] = args.batch * unread_bytes(kv_layout(model, weights, kv), windows, context)
    budget = parse_size(args.memory) if args.memory else None
    if budget is not None:
        plan.check(budget)

        def fitted(sequences: int | None) -> tuple[CacheShape, MemoryPlan]:
            return fit_cache(
                model,
                kv_layout(model, weights, kv),
                weights_bytes=plan.weights_bytes,
                context_window_size=context,
                prefill_chunk_size=args.prefill_chunk_size,
                max_batch_size=max(DEFAULT_BATCH, sequences or 1),
                max_num_sequence=sequences,
                budget=budget,
                **device_costs(model, args.prefill_chunk_size, args.device),
            )

        fields["max_tokens"] = fitted(args.batch)[1].max_tokens
        fields["max_sequences"] = _sequences_that_fit(args, model, weights, kv, context, budget)
        served, served_plan = fitted(None)
        fields |= {"served_sequences": served.num_open, "served_tokens": served_plan.max_tokens}
    if args.json:
        print(json.dumps(fields, indent=2))
    else:
        _print(
            f"{args.model}: weights {weights.name}, KV cache {kv}, {args.batch} x {context} tokens", fields
        )
    return 0


def _find(
    name: str, quantization: str | None, kv: str | None
) -> tuple[ModelConfig, WeightScheme, KVQuantization]:
    """Configuration of a preset, a converted directory or a checkpoint, and the schemes to plan for."""
    from kvq.config import CHAT_CONFIG_NAME, ChatConfig
    from kvq.errors import CheckpointError
    from kvq.loader.checkpoint import open_checkpoint
    from kvq.loader.source import resolve_for
    from kvq.model_source import resolve_model
    from kvq.presets import PRESETS
    from kvq.quantization.scheme import DEFAULT_QUANTIZATION, resolve

    if name.lower() in PRESETS and not Path(name).exists():
        return PRESETS[name.lower()], *resolve(quantization or DEFAULT_QUANTIZATION, kv)
    path = resolve_model(name)
    if not path.exists():
        raise CheckpointError(f"{name}: no such preset, file or directory; presets: {', '.join(PRESETS)}")
    if (path / CHAT_CONFIG_NAME).is_file():
        config = ChatConfig.load(path)
        if quantization is None:
            quantization, kv = config.quantization, kv or config.kv_quantization
        return config.served_model, *resolve(quantization, kv, config.weight_storage)
    with open_checkpoint(path) as checkpoint:
        return checkpoint.config, *resolve_for(checkpoint, quantization, kv)


def _sequences_that_fit(
    args: argparse.Namespace,
    model: ModelConfig,
    weights: WeightScheme,
    kv: KVQuantization,
    context: int,
    budget: int,
) -> int:
    """Most sequences of the whole context, open pages and all."""
    from kvq.memory import plan_memory

    def fits(batch: int) -> bool:
        plan = plan_memory(model, weights, kv, context, batch, args.prefill_chunk_size, device=args.device)
        return plan.total_bytes <= budget

    high = 1
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _print(title: str, fields: dict[str, Any]) -> None:
    from kvq.cli.tables import print_table
    from kvq.sizes import format_bytes

    names = {
        "weights_bytes": "weights",
        "kv_sealed_bytes": "KV: sealed pages",
        "kv_open_bytes": "KV: open pages",
        "kv_workspace_bytes": "KV: workspace",
        "activation_bytes": "activations (at most)",
        "device_bytes": "the driver",
        "total_bytes": "total",
    }
    rows = [
        [label, format_bytes(fields[name]), f"{fields[name]:,}"]
        for name, label in names.items()
        if fields[name]
    ]
    print_table(title, ["", "size", "bytes"], rows)
    print(f"{fields['bits_per_value']:.3f} bits per cached value, scales included")
    if fields["kv_unread_bytes"]:
        print(
            f"{format_bytes(fields['kv_unread_bytes'])} of the sealed pages lie before the windows of the "
            "sliding layers, unread: they stay because other layers see the whole context"
        )
    if "max_sequences" in fields:
        print(f"fits: {fields['max_tokens']:,} tokens in all, or {fields['max_sequences']} full sequences")
        print(
            f"an engine with this budget runs {fields['served_sequences']} requests at once, which share "
            f"{fields['served_tokens']:,} tokens"
        )
    else:
        print(f"the pool holds {fields['max_tokens']:,} tokens")
