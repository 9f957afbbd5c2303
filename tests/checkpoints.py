"""Writes tiny random Llama checkpoints in every format that kvq reads, without kvq's own readers."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import safetensors.numpy
from gguf.quants import quantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tiny_llama import TinyLlama

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_tiny_llama(
    directory: Path,
    *,
    seed: int = 0,
    gqa: int = 3,
    head_dim: int = 64,
    tied: bool = True,
    bias: bool = False,
    dtype: str = "float32",
    shards: int = 1,
    fmt: str = "safetensors",
    **more: Any,
) -> Path:
    """Write a tiny random Llama with a byte-level tokenizer, and return what to open.

    Parameters
    ----------
    directory : Path
        Where to write; created if need be.
    seed, gqa, head_dim, tied, bias, **more
        As in :class:`tiny_llama.TinyLlama`.
    dtype : str
        ``float32``, ``float16`` or ``bfloat16``; for GGUF also a type of it, such as ``Q8_0``.
    shards : int
        Weight files; more than one come with an index.
    fmt : str
        ``safetensors``, ``bin`` or ``gguf``.
    """
    tiny = TinyLlama(seed=seed, gqa=gqa, head_dim=head_dim, tied=tied, bias=bias, **more)
    directory.mkdir(parents=True, exist_ok=True)
    if fmt == "gguf":
        return write_gguf(directory / "model.gguf", tiny, dtype)
    tensors = {name: tensor.astype(DTYPES[dtype]) for name, tensor in tiny.tensors().items()}
    write_json(directory / "config.json", {**tiny.config(), "torch_dtype": dtype})
    write_tokenizer(directory, tiny.vocab_size)
    write_shards(directory, tensors, shards, fmt)
    return directory


def write_json(path: Path, data: object) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(data, indent=2), encoding="utf-8")


def edit_json(path: Path, **changes: object) -> None:
    """Set keys of a JSON file; ``None`` deletes a key."""
    data = json.loads(path.read_text(encoding="utf-8"))
    data.update(changes)
    write_json(path, {key: value for key, value in data.items() if value is not None})


def write_shards(directory: Path, tensors: dict[str, np.ndarray], shards: int, fmt: str) -> None:
    """Write tensors into one file, or several with an index."""
    stem, suffix, write = {
        "safetensors": ("model", ".safetensors", write_safetensors),
        "bin": ("pytorch_model", ".bin", write_torch),
    }[fmt]
    if shards == 1:
        write(directory / f"{stem}{suffix}", tensors)
        return
    weight_map = {}
    names = list(tensors)
    for i in range(shards):
        file = f"{stem}-{i + 1:05d}-of-{shards:05d}{suffix}"
        part = names[i::shards]
        write(directory / file, {name: tensors[name] for name in part})
        weight_map.update(dict.fromkeys(part, file))
    write_json(directory / f"{stem}{suffix}.index.json", {"metadata": {}, "weight_map": weight_map})


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a safetensors file with the reference library."""
    path.write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))


def write_torch(path: Path, tensors: dict[str, np.ndarray], root: str = "archive") -> None:
    """Write what ``torch.save`` writes for a state dict: a zip of a pickle and storages."""
    storage = {"float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage"}
    code = [b"\x80\x02ccollections\nOrderedDict\n)R("]
    for key, (name, tensor) in enumerate(tensors.items()):
        stride = [int(np.prod(tensor.shape[i + 1 :])) for i in range(tensor.ndim)]
        code.append(_text(name) + b"ctorch._utils\n_rebuild_tensor_v2\n((")
        code.append(_text("storage") + b"ctorch\n" + storage[tensor.dtype.name].encode() + b"\n")
        code.append(_text(str(key)) + _text("cpu") + _int(tensor.size) + b"tQ" + _int(0))
        code.append(b"(" + b"".join(map(_int, tensor.shape)) + b"t(" + b"".join(map(_int, stride)) + b"t")
        code.append(b"\x89ccollections\nOrderedDict\n)RtR")
    code.append(b"u.")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{root}/data.pkl", b"".join(code))
        for key, tensor in enumerate(tensors.values()):
            archive.writestr(f"{root}/data/{key}", tensor.tobytes())
        archive.writestr(f"{root}/version", b"3\n")


def _text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def _int(value: int) -> bytes:
    return b"J" + int(value).to_bytes(4, "little")


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer of at most ``vocab_size`` tokens, its configuration and template."""
    tokens = byte_level_tokens(vocab_size)
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    write_json(directory / "tokenizer_config.json", settings)


def byte_level_tokens(vocab_size: int) -> list[str]:
    """Special tokens, then the 256 bytes in the GPT-2 alphabet."""
    return [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())][:vocab_size]


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    for ours, theirs in _GGUF_NAMES.items():
        name = name.replace(ours, theirs)
    return name.replace("model.layers.", "blk.")


def permute(tensor: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows that llama.cpp's converter gives to q and k."""
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(
    path: Path,
    tiny: TinyLlama,
    dtype: str = "float32",
    arch: str = "llama",
    extra: dict[str, np.ndarray] | None = None,
    parts: int = 1,
    dtypes: dict[str, str] | None = None,
) -> Path:
    """Write a GGUF file with the reference library, with a byte-level vocabulary.

    ``dtypes`` gives tensors whose Hugging Face name holds a key another type than ``dtype``.
    """
    writer = gguf.GGUFWriter(path, arch)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    config = tiny.config()
    writer.add_block_count(tiny.num_layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(tiny.hidden_size)
    writer.add_feed_forward_length(tiny.intermediate_size)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(tiny.num_kv_heads)
    writer.add_key_length(tiny.head_dim)
    writer.add_value_length(tiny.head_dim)
    writer.add_rope_dimension_count(tiny.head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    tokens = [*byte_level_tokens(tiny.vocab_size), "th"]
    types = [3 if token in SPECIAL_TOKENS else 1 for token in tokens]
    unused = [f"[PAD{i}]" for i in range(len(tokens), tiny.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens + unused)
    writer.add_token_types(types + [5] * len(unused))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in tiny.tensors().items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": tiny.num_kv_heads}
        for part, count in heads.items():
            if part in name:
                tensor = permute(tensor, count)
        kind = next((kind for part, kind in (dtypes or {}).items() if part in name), dtype)
        _add_tensor(writer, gguf_name(name), tensor, kind)
    for name, tensor in (extra or {}).items():
        _add_tensor(writer, name, tensor, "float32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray, dtype: str) -> None:
    if tensor.ndim == 1 or dtype == "float32":
        writer.add_tensor(name, np.ascontiguousarray(tensor, np.float32))
    elif dtype == "float16":
        writer.add_tensor(name, tensor.astype(np.float16))
    else:
        kind = gguf.GGMLQuantizationType["BF16" if dtype == "bfloat16" else dtype]
        writer.add_tensor(name, quantize(np.ascontiguousarray(tensor), kind), raw_dtype=kind)
