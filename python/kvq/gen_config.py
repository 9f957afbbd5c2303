"""``gen_config``: write ``mlc-chat-config.json`` and the tokenizer files of a model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import tokenizers

from kvq.config import ChatConfig, ModelConfig, describe_validation
from kvq.errors import CheckpointError, ConfigError
from kvq.layout import KVLayout
from kvq.loader.chat_source import ChatSource, read_chat_source
from kvq.loader.checkpoint import open_checkpoint
from kvq.loader.source import resolve_for
from kvq.quantization.scheme import KVQuantization, WeightScheme
from kvq.quantization.weights import stored_parameters
from kvq.tokenizer.chat_template import ChatTemplate
from kvq.tokenizer.conv_templates import CHECKPOINT, built_in_template

DEFAULT_PREFILL_CHUNK = 2048
DEFAULT_BATCH = 128
#: Sampling where the checkpoint says nothing.
DEFAULT_SAMPLING = {"temperature": 0.7, "top_p": 0.95, "repetition_penalty": 1.0}
#: Markers with which chat templates end a turn.
END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|eot|>",
    "<|return|>",
    "</s>",
)


def gen_config(
    model: str | Path,
    quantization: str | None,
    output: str | Path,
    *,
    kv_quantization: str | None = None,
    context_window_size: int | None = None,
    prefill_chunk_size: int | None = None,
    max_batch_size: int | None = None,
    conv_template: str | None = None,
) -> ChatConfig:
    """Write the configuration and the tokenizer files of a checkpoint.

    Parameters
    ----------
    model : str or Path
        A Hugging Face directory or a ``.gguf`` file.
    quantization : str or None
        A weight scheme or an alias; None for what the checkpoint becomes by default.
    output : str or Path
        The directory to write to.
    kv_quantization : str, optional
        Cache scheme; the alias decides if not given.
    context_window_size : int, optional
        Most tokens of a sequence; what the model was trained for if not given.
    prefill_chunk_size : int, optional
        Most tokens of a prefill step: 2,048 if not given, never more than the context.
    max_batch_size : int, optional
        Most sequences at once: 128 if not given.
    conv_template : str, optional
        A built-in chat template; the checkpoint's own if not given.

    Returns
    -------
    ChatConfig
        What was written.

    Raises
    ------
    KvqError
        If the checkpoint does not serve, or what is asked cannot work.
    """
    with open_checkpoint(model) as checkpoint:
        weights, kv = resolve_for(checkpoint, quantization, kv_quantization)
        config = checkpoint.config
        _check_geometry(config, weights, kv)
        source = read_chat_source(checkpoint)
        context = _context_window(config, context_window_size)
        tokenizer = _load_tokenizer(source, checkpoint.path)
        name, template = _choose_template(source, conv_template)
        _try_template(template, tokenizer, source)
        stop_ids, stop_strings = stop_conditions(tokenizer, template, source.eos_token_ids)
        fields: dict[str, Any] = {
            "model_type": config.model_type,
            "quantization": weights.name,
            "model": config,
            "vocab_size": config.vocab_size,
            "context_window_size": context,
            "prefill_chunk_size": min(prefill_chunk_size or DEFAULT_PREFILL_CHUNK, context),
            "max_batch_size": max_batch_size or DEFAULT_BATCH,
            **DEFAULT_SAMPLING,
            **source.sampling,
            "tokenizer_files": sorted(source.files),
            "tokenizer_info": _tokenizer_info(source),
            "conv_template": name,
            "pad_token_id": source.pad_token_id,
            "bos_token_id": source.bos_token_id,
            "eos_token_id": source.eos_token_ids[0]
            if len(source.eos_token_ids) == 1
            else source.eos_token_ids or None,
            "kv_quantization": str(kv),
            "weight_storage": dict(weights.table),
            "active_vocab_size": _active_vocab(tokenizer, config, checkpoint.path),
            "chat_template": template,
            "stop_token_ids": stop_ids,
            "stop_strings": stop_strings,
        }
    try:
        chat = ChatConfig(**fields)
    except ValueError as problem:
        raise ConfigError(describe_validation(problem)) from None  # type: ignore[arg-type]
    output = Path(output)
    _write_files(output, source.files)
    chat.save(output)
    return chat


def _check_geometry(config: ModelConfig, weights: WeightScheme, kv: KVQuantization) -> None:
    """Refuse at once what the compiler or the cache would refuse later."""
    KVLayout(
        config.num_hidden_layers,
        config.num_key_value_heads,
        config.head_dim,
        kv.k_bits,
        kv.v_bits,
        row_dtype=kv.row_dtype(weights),
    )
    stored_parameters(config, weights)


def _context_window(config: ModelConfig, asked: int | None) -> int:
    trained = config.max_position_embeddings
    if asked is None:
        return trained
    scaling = config.rope_scaling or {}
    original = scaling.get("original_max_position_embeddings") or trained
    limit = max(trained, int(original * float(scaling.get("factor") or 1)))
    if not 0 < asked <= limit:
        raise ConfigError(
            f"--context-window-size {asked} is out of range: the model serves 1 to {limit} tokens"
            + ("" if scaling else " (its configuration has no rope_scaling)")
        )
    return asked


def _load_tokenizer(source: ChatSource, path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(source.files["tokenizer.json"].decode())
    except Exception as problem:  # the library raises nothing narrower
        raise CheckpointError(f"{path}/tokenizer.json: cannot be read as a tokenizer: {problem}") from None


def _active_vocab(tokenizer: tokenizers.Tokenizer, config: ModelConfig, path: Path) -> int:
    """Ids that stand for something; embeddings are often padded beyond them."""
    size: int = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    if size > config.vocab_size:
        raise ConfigError(
            f"{path}: the tokenizer has ids up to {size - 1}, the model only {config.vocab_size} embeddings: "
            "they are of different models"
        )
    return size


def _choose_template(source: ChatSource, asked: str | None) -> tuple[str, str]:
    """Name and text of the chat template; a checkpoint without one (a base model) gets ``plain``."""
    if asked is None and source.template is None:
        asked = "plain"
    if asked is None or asked == CHECKPOINT:
        if source.template is None:
            raise ConfigError("the checkpoint has no chat template: use --conv-template with a built-in one")
        return CHECKPOINT, source.template
    return asked, built_in_template(asked)


def _try_template(template: str, tokenizer: tokenizers.Tokenizer, source: ChatSource) -> None:
    """Render one message, so that a broken template is found now and not in the first chat."""
    ids = (source.bos_token_id, source.eos_token_ids[0] if source.eos_token_ids else None)
    tokens = ["" if index is None else tokenizer.id_to_token(index) or "" for index in ids]
    ChatTemplate(template, *tokens).render([{"role": "user", "content": "Hello"}])


def stop_conditions(
    tokenizer: tokenizers.Tokenizer, template: str, eos_token_ids: list[int]
) -> tuple[list[int], list[str]]:
    """Where an answer ends.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
        Decides whether a marker is one token.
    template : str
        Chat template; the markers in it that end a turn are used.
    eos_token_ids : list of int
        Ids that configuration and tokenizer name.

    Returns
    -------
    (list of int, list of str)
        Ids that stop generation, and markers that are no single token, to be found in the text.
    """
    ids, strings = list(eos_token_ids), []
    for marker in END_OF_TURN:
        if marker not in template:
            continue
        index = tokenizer.token_to_id(marker)
        if index is None:
            strings.append(marker)
        elif index not in ids:
            ids.append(index)
    return ids, strings


def _tokenizer_info(source: ChatSource) -> dict[str, Any]:
    """MLC-LLM's summary of how the tokenizer treats bytes and spaces."""
    description = json.loads(source.files["tokenizer.json"])
    decoder = json.dumps(description.get("decoder"))
    normalizer = json.dumps(description.get("normalizer"))
    return {
        "token_postproc_method": "byte_level" if '"ByteLevel"' in decoder else "byte_fallback",
        "prepend_space_in_encode": '"Prepend"' in normalizer,
        "strip_space_in_decode": '"Strip"' in decoder,
    }


def _write_files(output: Path, files: dict[str, bytes]) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            temporary = output / f".{name}.{os.getpid()}.tmp"
            try:
                temporary.write_bytes(content)
                os.replace(temporary, output / name)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as problem:
        raise ConfigError(f"{output}: cannot be written: {problem.strerror}") from None
