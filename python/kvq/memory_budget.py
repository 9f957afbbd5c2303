"""What a budget of memory holds: how many sequences at once, and how many pages of cache."""

from __future__ import annotations

from pathlib import Path

from kvq.config import ModelConfig
from kvq.errors import ConfigError, OutOfMemoryError
from kvq.layout import KVLayout
from kvq.memory import MemoryPlan, plan_cache
from kvq.runtime.cache_shape import SCRATCH_SLOTS, CacheShape, most_pages
from kvq.sizes import format_bytes

#: How an engine shares its memory when it is not told in detail.
MODES = ("local", "interactive", "server")
#: Tokens of a sequence by which open pages are balanced against sealed ones.
TYPICAL_TOKENS = 2048
_LOCAL_SEQUENCES = 4


def fit_cache(
    model: ModelConfig,
    layout: KVLayout,
    *,
    weights_bytes: int,
    context_window_size: int,
    prefill_chunk_size: int,
    max_batch_size: int,
    mode: str = "local",
    max_num_sequence: int | None = None,
    budget: int | None = None,
    fill: bool = True,
    scratch_slots: int = SCRATCH_SLOTS,
    step_bytes: int | None = None,
    device_bytes: int = 0,
    largest_tensor: int | None = None,
) -> tuple[CacheShape, MemoryPlan]:
    """Balance open pages (sequences at once) against sealed ones, and plan the result.

    Parameters
    ----------
    context_window_size, prefill_chunk_size, max_batch_size : int
        Limits of a sequence, of a step, and of the library.
    mode : str
        ``interactive`` is one sequence. Otherwise a budget decides their number, so that each can have
        :data:`TYPICAL_TOKENS`; without a budget there are four.
    max_num_sequence : int, optional
        Sequences at once, whatever the mode.
    budget : int, optional
        Bytes of everything, weights included; open and sealed pages share what the rest leaves. Without it
        the pool holds a whole context, or :data:`TYPICAL_TOKENS` of each sequence where that is more.
    fill : bool
        Whether the pool takes all of the budget, even beyond a whole context of every sequence.
    scratch_slots, step_bytes, device_bytes : int
        As of :func:`kvq.memory.plan_cache`.
    largest_tensor : int, optional
        Bytes of the largest tensor that the device can have. Sealed pages are one tensor, open ones another.

    Raises
    ------
    ConfigError
        If the mode is unknown or ``max_num_sequence`` is outside what the library allows.
    OutOfMemoryError
        If not even one whole context fits the budget, or a tensor of the device.
    """
    if mode not in MODES:
        raise ConfigError(f"--mode {mode!r} is unknown: use {', '.join(MODES)}")
    if max_num_sequence is not None and not 1 <= max_num_sequence <= max_batch_size:
        raise ConfigError(
            f"--max-num-sequence {max_num_sequence} is outside 1 .. {max_batch_size}, which the library was "
            "compiled for"
        )
    context_pages, typical_pages = (
        most_pages(layout.page_size, model.cache_window, tokens, prefill_chunk_size)
        for tokens in (context_window_size, min(context_window_size, TYPICAL_TOKENS))
    )

    if largest_tensor is not None:
        sealed = context_pages * layout.page_bytes
        if largest_tensor < sealed:
            raise OutOfMemoryError(
                f"{context_window_size} tokens take {format_bytes(sealed)} of sealed pages, but a tensor of "
                f"the device has at most {format_bytes(largest_tensor)}: lower it with --context-window-size "
                "or fewer bits (--kv-quantization)"
            )
        max_batch_size = max(1, min(max_batch_size, largest_tensor // layout.open_page_bytes))

    def within(pages: int) -> int:
        return pages if largest_tensor is None else min(pages, largest_tensor // layout.page_bytes)

    def planned(sequences: int, pages: int) -> tuple[CacheShape, MemoryPlan]:
        shape = CacheShape.for_limits(
            layout,
            context_window_size=context_window_size,
            max_batch_size=sequences,
            prefill_chunk_size=prefill_chunk_size,
            num_pages=pages,
        )
        rows = max(min(prefill_chunk_size, context_window_size * sequences), sequences)
        return shape, plan_cache(
            model,
            layout,
            shape,
            weights_bytes=weights_bytes,
            max_rows=rows,
            scratch_slots=scratch_slots,
            step_bytes=step_bytes,
            device_bytes=device_bytes,
        )

    def needed(sequences: int) -> int:
        return max(1, context_pages, sequences * typical_pages)

    if budget is None:
        sequences = max_num_sequence or min(max_batch_size, 1 if mode == "interactive" else _LOCAL_SEQUENCES)
        return planned(sequences, within(needed(sequences)))

    def pages_left(sequences: int) -> int:
        rest = planned(sequences, 1)[1].total_bytes - layout.page_bytes
        return within((budget - rest) // layout.page_bytes)

    sequences = max_num_sequence or 1
    if max_num_sequence is None and mode != "interactive":
        while sequences < max_batch_size and pages_left(sequences + 1) >= needed(sequences + 1):
            sequences += 1
    pages = pages_left(sequences)
    if pages < max(1, context_pages):
        planned(sequences, context_pages)[1].check(budget)
    return planned(sequences, pages if fill else min(pages, max(1, sequences * context_pages)))


def available_memory() -> int | None:
    """Bytes that this process can still have: of the machine, and of its container; None where unknown."""
    limits = []
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    most, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if most.isdigit() and used.isdigit():
        limits.append(max(0, int(most) - int(used)))
    return min(limits, default=None)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
