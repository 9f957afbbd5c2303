"""Write a checkpoint whose keys have outlier channels, as Qwen2.5's do, and which computes the same function.

Four RoPE pairs of every KV head are scaled, keys up and the queries that meet them down by the same factor::

    python scripts/scale_keys.py SmolLM2-135M-Instruct.Q4_1.gguf OUT
    kvq eval perplexity OUT --quantization q0f32 --kv none,int4,int3

The weights are written as float32, so that scaling rounds next to nothing.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import numpy as np
import safetensors.numpy

from kvq.config import ModelConfig
from kvq.loader.chat_source import read_chat_source
from kvq.loader.checkpoint import open_checkpoint

FACTOR, PAIRS = 100.0, 4
_PROJECTION = re.compile(r"self_attn\.([qk])_proj\.(weight|bias)$")


def scaled(name: str, value: np.ndarray, config: ModelConfig, factor: float = FACTOR) -> np.ndarray:
    """The tensor ``name`` of the scaled checkpoint, float32; the same tensor if it makes no keys or queries.

    The pairs lie evenly between the fastest and the slowest rotation; a pair is channels ``i`` and
    ``i + head_dim / 2`` of a head.
    """
    found = _PROJECTION.search(name)
    value = value.astype(np.float32)
    if found is None:
        return value
    half = config.head_dim // 2
    pairs = (np.arange(PAIRS) * half // PAIRS) + half // (2 * PAIRS)
    heads = value.reshape(-1, config.head_dim, *value.shape[1:]).copy()
    heads[:, np.concatenate([pairs, pairs + half])] *= np.float32(factor if found[1] == "k" else 1 / factor)
    return heads.reshape(value.shape)


def main() -> None:
    """Parse the command line and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a .gguf file or a Hugging Face directory")
    parser.add_argument("output", type=Path, help="directory to write")
    parser.add_argument("--factor", type=float, default=FACTOR)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    with open_checkpoint(args.model) as checkpoint:
        config = checkpoint.config
        tensors = {
            name: scaled(name, checkpoint.tensor(name), config, args.factor)
            for name in checkpoint.tensor_names()
            if not (config.tie_word_embeddings and name == "lm_head.weight")
        }
        chat = read_chat_source(checkpoint)
    safetensors.numpy.save_file(tensors, args.output / "model.safetensors")
    architecture = {"architectures": [f"{config.model_type.capitalize()}ForCausalLM"]}
    (args.output / "config.json").write_text(json.dumps({**config.model_dump(), **architecture}, indent=2))
    for name, content in chat.files.items():
        (args.output / name).write_bytes(content)


if __name__ == "__main__":
    main()
