"""Write the golden logits that the tests compare kvq with: Hugging Face transformers, fp32, on the CPU.

Needs ``torch transformers gguf safetensors`` (not dependencies of kvq)::

    python scripts/make_goldens.py tests/goldens --gguf SmolLM2-135M-Instruct.Q4_1.gguf

``tiny_NAME.npz``  of each architecture in ``tests/tiny_llama.py``: ``tokens`` int32 ``[n]``, ``rows`` int32
                   ``[r]``, ``logits`` float32 ``[r, vocab]``.
``smollm2.npz``    of the demo model, for each prompt ``i``: ``tokens_i`` int32 ``[n]``, ``last_i`` float32
                   ``[vocab]`` (all logits of the last row), ``top_ids_i`` and ``top_logits_i`` ``[n, 16]``
                   (the largest of every row), ``sample_logits_i`` ``[n, 32]`` at the entries ``sample_ids``.
``smollm2_perplexity.json``  of the demo model with weights rounded to fp16, on the first tokens of the prose
                   that ships with kvq: ``tokens``, their ``sha256`` as int32, and for each window size (no
                   overlap, first token of a window not scored) ``scored`` tokens and ``perplexity``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from tiny_llama import GOLDEN_CASES, TinyLlama

#: Longer than two pages of 64 tokens, and no multiple of a page.
TINY_TOKENS = 150
#: The first rows, the rows around each end of a page, and the last one.
TINY_ROWS = (0, 1, 31, 62, 63, 64, 65, 100, 127, 128, 129, 149)
TOP, SAMPLE = 16, 32
#: Text, tokens and windows of the perplexity.
PROSE = Path(__file__).resolve().parent.parent / "python/kvq/eval/texts/opticks_queries.txt"
PROSE_TOKENS, WINDOWS = 4096, (1024, 2048)

PROMPTS = {
    20: ("The capital of France is Paris, and the capital of Italy is Rome. The capital of Spain is"),
    100: (
        "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    "
        "return a\n\n\n"
        "def test_fibonacci():\n    assert fibonacci(0) == 0\n    assert fibonacci(1) == 1\n    "
        "assert fibonacci(10) == 55\n\n"
        "The function above"
    ),
    300: (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n"
        "A page of the cache holds sixty-four tokens. Once a page is full its keys and values are "
        "written in four bits, and until then they are kept as they came. Some people worry that a "
        "model which reads from such a cache forgets the small things: the name of a street, the "
        "third digit of a number, the colour of a coat that somebody wore in the first chapter. So "
        "here are a few small things. Mary Evans lives at 48 Orchard Lane in Bristol. She has two "
        "brothers, Tom, who is 31, and Arthur, who is 27 and plays the cello. Their father kept "
        "bees, eleven hives of them, behind a stone wall at the end of the garden, and sold the "
        "honey in green jars at three pounds and fifty pence each. In the summer of 1976 the pond "
        "dried out and the heron left; it came back on the ninth of March, two years later. The "
        "car was a grey Morris with a dent in the left door, and the dog, whose name was Biscuit, "
        "slept on its back seat. Every Thursday at a quarter past six the whole family ate fish "
        "pie. Where does Mary live, how old is Arthur, what did the jars of honey cost, and what "
        "was the dog called?<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
}


def hugging_face_model(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> LlamaForCausalLM:
    """A transformers model in fp32 that holds exactly ``tensors``."""
    model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager", torch_dtype=torch.float32))
    missing, unexpected = model.load_state_dict(
        {name: torch.from_numpy(value) for name, value in tensors.items()}, strict=False
    )
    if unexpected or set(missing) - ({"lm_head.weight"} if config["tie_word_embeddings"] else set()):
        raise SystemExit(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.eval()


def logits_of(model: LlamaForCausalLM, tokens: np.ndarray) -> np.ndarray:
    """Logits of every row, float32 ``[n, vocab]``, in one pass without a cache."""
    with torch.inference_mode():
        out = model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False)
    return out.logits[0].float().numpy()


def write_tiny(path: Path, case: TinyLlama) -> None:
    """Write ``tiny_NAME.npz``."""
    tokens = case.prompt(TINY_TOKENS)
    logits = logits_of(hugging_face_model(case.config(), case.tensors()), tokens)
    rows = np.array(TINY_ROWS, np.int32)
    np.savez_compressed(path, tokens=tokens, rows=rows, logits=logits[rows])
    print(f"{path.name}: max|logit| {np.abs(logits).max():.2f}, std {logits.std():.2f}")


def gguf_tensors(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Configuration and fp32 tensors of a Llama GGUF, names and row order of Hugging Face."""
    reader = GGUFReader(path)

    def key(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = key("attention.head_count"), key("attention.head_count_kv")
    tensors = {}
    for tensor in reader.tensors:
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = tensor.name
        for rows, part in ((heads, "attn_q"), (kv_heads, "attn_k")):
            if f".{part}." in name:  # llama.cpp stores the halves of each head interleaved
                halves = value.reshape(rows, value.shape[0] // rows // 2, 2, value.shape[1])
                value = halves.swapaxes(1, 2).reshape(value.shape)
        for old, new in (
            ("token_embd", "model.embed_tokens"),
            ("output_norm", "model.norm"),
            ("blk.", "model.layers."),
            ("attn_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
            ("attn_output", "self_attn.o_proj"),
            ("attn_", "self_attn."),
            ("self_attn.q.", "self_attn.q_proj."),
            ("self_attn.k.", "self_attn.k_proj."),
            ("self_attn.v.", "self_attn.v_proj."),
            ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"),
        ):
            name = name.replace(old, new)
        tensors[name] = np.ascontiguousarray(value)
    config = {
        "vocab_size": key("vocab_size"),
        "hidden_size": key("embedding_length"),
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": float(key("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(key("rope.freq_base")),
        "max_position_embeddings": key("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": False,
        "mlp_bias": False,
    }
    return config, tensors


def tokenizer_of(gguf: Path) -> Any:
    """The tokenizer inside a GGUF."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / gguf.name).symlink_to(gguf.resolve())
        return AutoTokenizer.from_pretrained(directory, gguf_file=gguf.name)


def write_perplexity(path: Path, gguf: Path) -> None:
    """Write ``smollm2_perplexity.json``."""
    config, tensors = gguf_tensors(gguf)
    rounded = {name: value.astype(np.float16).astype(np.float32) for name, value in tensors.items()}
    model = hugging_face_model(config, rounded)
    ids = tokenizer_of(gguf).encode(PROSE.read_text(encoding="utf-8"), add_special_tokens=False)
    tokens = np.array(ids[:PROSE_TOKENS], np.int32)
    found: dict[str, Any] = {
        "tokens": len(tokens),
        "sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
        "windows": {},
    }
    for window in WINDOWS:
        nll: list[float] = []
        for begin in range(0, len(tokens), window):
            part = tokens[begin : begin + window]
            log_probs = torch.log_softmax(torch.from_numpy(logits_of(model, part)[:-1]).double(), -1)
            nll += (-log_probs[range(len(part) - 1), part[1:]]).tolist()
        found["windows"][str(window)] = {"scored": len(nll), "perplexity": float(np.exp(np.mean(nll)))}
    path.write_text(json.dumps(found, indent=2) + "\n")
    print(f"{path.name}: {found['windows']}")


def write_smollm2(path: Path, gguf: Path) -> None:
    """Write ``smollm2.npz``."""
    config, tensors = gguf_tensors(gguf)
    model = hugging_face_model(config, tensors)
    tokenizer = tokenizer_of(gguf)
    sample = np.sort(np.random.RandomState(0).choice(config["vocab_size"], SAMPLE, replace=False))
    arrays = {"sample_ids": sample.astype(np.int32)}
    for i, (length, text) in enumerate(PROMPTS.items()):
        tokens = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
        logits = logits_of(model, tokens)
        top = np.argsort(-logits, axis=1, kind="stable")[:, :TOP]
        arrays |= {
            f"tokens_{i}": tokens,
            f"last_{i}": logits[-1],
            f"top_ids_{i}": top.astype(np.int32),
            f"top_logits_{i}": np.take_along_axis(logits, top, axis=1),
            f"sample_logits_{i}": logits[:, sample],
        }
        nll = -torch.log_softmax(torch.from_numpy(logits[:-1]), -1)[range(len(tokens) - 1), tokens[1:]]
        print(
            f"prompt {i} (~{length}): {len(tokens)} tokens, nll {nll.mean():.3f}, "
            f"max|logit| {np.abs(logits).max():.1f}, then {tokenizer.decode(int(top[-1, 0]))!r}"
        )
    np.savez_compressed(path, **arrays)


def main() -> None:
    """Parse the command line and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="directory of the golden files")
    parser.add_argument("--gguf", type=Path, help="the demo model; without it only the tiny ones are written")
    args = parser.parse_args()
    torch.set_num_threads(2)
    args.output.mkdir(parents=True, exist_ok=True)
    for name, case in GOLDEN_CASES.items():
        write_tiny(args.output / f"tiny_{name}.npz", case)
    if args.gguf:
        write_smollm2(args.output / "smollm2.npz", args.gguf)
        write_perplexity(args.output / "smollm2_perplexity.json", args.gguf)


if __name__ == "__main__":
    main()
