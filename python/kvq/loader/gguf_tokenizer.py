"""Builds a ``tokenizers`` tokenizer from the vocabulary inside a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvq.errors import CheckpointError, ConfigError
from kvq.loader.byte_level import build_byte_level
from kvq.loader.sentencepiece_model import SentencePieceModel, add_markers, build_sentencepiece
from kvq.loader.tokenizer_files import begin_with


def build_tokenizer(metadata: dict[str, Any], path: Path) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Parameters
    ----------
    metadata : dict
        Metadata of the file (``tokenizer.ggml.*``).
    path : Path
        The file, for messages.

    Raises
    ------
    CheckpointError
        If the file has no vocabulary, or an inconsistent one.
    ConfigError
        If the kind of tokenizer or of pre-tokenizer is not supported.
    """
    try:
        return _build(metadata, path)
    except (TypeError, ValueError, IndexError, AttributeError, OverflowError) as problem:
        raise CheckpointError(f"{path}: a value of the vocabulary makes no sense: {problem}") from None


def _build(metadata: dict[str, Any], path: Path) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens is missing: the file has no vocabulary")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens, path)
        add_markers(tokenizer, tokens, types)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens, types, path)
    else:
        raise ConfigError(f"{path}: tokenizer of kind {kind!r} is not supported: known are gpt2, llama")
    begin = metadata.get("tokenizer.ggml.bos_token_id")
    if begin is not None and metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        begin_with(tokenizer, tokens[begin], begin)
    return tokenizer


def _byte_level(metadata: dict[str, Any], tokens: list[str], path: Path) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens holds {len(tokens) - len(vocab)} tokens twice")
    merges = []
    for merge in metadata.get("tokenizer.ggml.merges") or []:
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    return build_byte_level(vocab, merges, metadata.get("tokenizer.ggml.pre", "default"), path)


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], types: list[int], path: Path) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise CheckpointError(
            f"{path}: tokenizer.ggml.scores is missing or of another length than the tokens"
        )
    model = SentencePieceModel(
        tokens,
        scores,
        types,
        unknown_id=metadata.get("tokenizer.ggml.unknown_token_id", 0),
        add_prefix=metadata.get("tokenizer.ggml.add_space_prefix", True),
    )
    return build_sentencepiece(model, path)
