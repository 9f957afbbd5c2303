"""What a checkpoint says about chatting: tokenizer files, template, special tokens, sampling."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvq.config import read_json
from kvq.errors import CheckpointError
from kvq.loader.checkpoint import Checkpoint

#: Files of a Hugging Face directory that belong to its tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


@dataclass
class ChatSource:
    """Chat-related content of a checkpoint.

    Attributes
    ----------
    files : dict
        Name of a tokenizer file to its content; ``tokenizer.json`` is always among them.
    template : str or None
        Jinja text of the chat template.
    bos_token_id, pad_token_id : int or None
        As far as they are known.
    eos_token_ids : list of int
        Ids that end an answer according to every file that names one, without duplicates.
    sampling : dict
        ``temperature``, ``top_p``, ``repetition_penalty`` where given.
    """

    files: dict[str, bytes]
    template: str | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_ids: list[int] = field(default_factory=list)
    sampling: dict[str, float] = field(default_factory=dict)


def read_chat_source(checkpoint: Checkpoint) -> ChatSource:
    """Collect the tokenizer and the chat settings of a checkpoint.

    Raises
    ------
    CheckpointError
        If there is no tokenizer, or one of the files is damaged.
    ConfigError
        If the kind of tokenizer inside a GGUF file is not supported.
    """
    if checkpoint.gguf is not None:
        return _from_gguf(checkpoint.gguf.file.metadata, checkpoint.path)
    return _from_directory(checkpoint.path)


def _from_gguf(metadata: dict[str, Any], path: Path) -> ChatSource:
    from kvq.loader.gguf_tokenizer import build_tokenizer

    tokenizer = build_tokenizer(metadata, path)
    tokens = metadata["tokenizer.ggml.tokens"]

    def special(name: str) -> int | None:
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return index if index is not None and index < len(tokens) else None

    ids = {name: special(name) for name in ("bos", "eos", "eot", "eom", "padding", "unknown")}
    template = metadata.get("tokenizer.chat_template")
    named = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
    tokenizer_config: dict[str, Any] = {
        key: tokens[index] for name, key in named.items() if (index := ids[name]) is not None
    }
    if template:
        tokenizer_config["chat_template"] = template
    sampling = {
        key: float(metadata[name])
        for key, name in (("temperature", "general.sampling.temp"), ("top_p", "general.sampling.top_p"))
        if name in metadata
    }
    return ChatSource(
        files={
            "tokenizer.json": tokenizer.to_str(pretty=False).encode(),
            "tokenizer_config.json": json.dumps(tokenizer_config, indent=2, ensure_ascii=False).encode(),
        },
        template=template,
        bos_token_id=ids["bos"],
        pad_token_id=ids["padding"],
        eos_token_ids=_distinct(ids["eos"], ids["eot"], ids["eom"]),
        sampling=sampling,
    )


def _from_directory(path: Path) -> ChatSource:
    from kvq.loader.tokenizer_files import build_from_directory

    try:
        files = {name: (path / name).read_bytes() for name in TOKENIZER_FILES if (path / name).is_file()}
    except OSError as problem:
        raise CheckpointError(f"{problem.filename}: cannot be read: {problem.strerror}") from None
    tokenizer_config = _optional(path / "tokenizer_config.json")
    if "tokenizer.json" not in files:
        made = build_from_directory(path, tokenizer_config)
        files["tokenizer.json"] = made.to_str(pretty=False).encode()
    generation = _optional(path / "generation_config.json")
    config = _optional(path / "config.json")
    vocab = _vocab(files["tokenizer.json"], path / "tokenizer.json")

    def token_id(key: str) -> int | None:
        token = tokenizer_config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        return vocab.get(token) if isinstance(token, str) else None

    def first(key: str) -> int | None:
        for value in (generation.get(f"{key}_token_id"), config.get(f"{key}_token_id")):
            if isinstance(value, int):
                return value
        return token_id(f"{key}_token")

    keys = ("temperature", "top_p", "repetition_penalty")
    return ChatSource(
        files=files,
        template=_template(path, tokenizer_config),
        bos_token_id=first("bos"),
        pad_token_id=first("pad"),
        eos_token_ids=_distinct(
            generation.get("eos_token_id"), config.get("eos_token_id"), token_id("eos_token")
        ),
        sampling={key: float(generation[key]) for key in keys if generation.get(key) is not None},
    )


def _optional(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    data = read_json(path, CheckpointError)
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return data


def _vocab(content: bytes, path: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    try:
        vocab: dict[str, int] = Tokenizer.from_buffer(content).get_vocab(with_added_tokens=True)
    except Exception as problem:  # the library raises nothing narrower
        raise CheckpointError(f"{path}: cannot be read as a tokenizer: {problem}") from None
    return vocab


def _template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    jinja = path / "chat_template.jinja"
    if jinja.exists():
        return jinja.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several, by name
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else None


def _distinct(*values: Any) -> list[int]:
    """Ids given as numbers, lists of numbers or None, in order and once each."""
    out: list[int] = []
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and item not in out:
                out.append(item)
    return out
