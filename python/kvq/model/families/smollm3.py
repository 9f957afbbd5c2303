"""SmolLM3: Llama in which every fourth layer has no RoPE."""

from __future__ import annotations

from typing import Any

from .base import Family, HFConfig, sliding_layers
from .llama import LLAMA


def _fields(config: HFConfig) -> dict[str, Any]:
    interval = config.get("no_rope_layer_interval", 4)
    listed = config.get("no_rope_layers")  # despite its name, 1 stands for a layer with RoPE
    rotates = tuple(map(bool, listed)) if listed else config.per_layer(lambda i: (i + 1) % interval != 0)
    slides = config.get("use_sliding_window", False)
    return {
        **LLAMA.fields(config),
        **(sliding_layers(config, lambda i: not rotates[i]) if slides else {}),
        "rope_layers": rotates,
    }


SMOLLM3 = Family("smollm3", _fields, defaults={"tie_word_embeddings": True, "rope_theta": 2e6})
