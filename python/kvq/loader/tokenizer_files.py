"""The tokenizer of a directory that has no ``tokenizer.json``: made from what it has instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from kvq.errors import CheckpointError
from kvq.loader.sentencepiece_model import build_sentencepiece, parse_sentencepiece
from kvq.loader.tiktoken_file import build_tiktoken, is_tiktoken


def build_from_directory(path: Path, tokenizer_config: dict[str, Any]) -> Tokenizer:
    """Build the tokenizer of ``tokenizer.model`` (SentencePiece or tiktoken) or of a ``.tiktoken`` file.

    Parameters
    ----------
    path : Path
        The directory.
    tokenizer_config : dict
        Its ``tokenizer_config.json``: tokens that were added, and whether texts begin with a token.

    Raises
    ------
    CheckpointError
        If there is no such file, or it is damaged.
    ConfigError
        If its kind is not supported.
    """
    found = [path / "tokenizer.model", *sorted(path.glob("*.tiktoken"))]
    file = next((file for file in found if file.is_file()), None)
    if file is None:
        raise CheckpointError(
            f"{path}: no tokenizer.json, tokenizer.model or *.tiktoken: save the tokenizer with "
            "transformers (a fast tokenizer) once"
        )
    try:
        data = file.read_bytes()
    except OSError as problem:
        raise CheckpointError(f"{file}: cannot be read: {problem.strerror}") from None
    if is_tiktoken(data):
        tokenizer = build_tiktoken(data, file)
        begin = tokenizer.token_to_id("<|begin_of_text|>")
    else:
        model = parse_sentencepiece(data, file)
        tokenizer = build_sentencepiece(model, file)
        begin = model.begin_id if 0 <= model.begin_id < len(model.pieces) else None
    _add_tokens(tokenizer, tokenizer_config, path)
    token = None if begin is None else tokenizer.id_to_token(begin)
    if begin is not None and token is not None and tokenizer_config.get("add_bos_token", True):
        begin_with(tokenizer, token, begin)
    return tokenizer


def begin_with(tokenizer: Tokenizer, token: str, index: int) -> None:
    """Let ``encode`` start a text with a token, where special tokens are asked for."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[f"{token}:0", "$A:0"],
        pair=[f"{token}:0", "$A:0", "$B:1"],
        special_tokens=[(token, index)],
    )


def _add_tokens(tokenizer: Tokenizer, tokenizer_config: dict[str, Any], path: Path) -> None:
    """Add the tokens of ``added_tokens_decoder``, each at its id."""
    listed = tokenizer_config.get("added_tokens_decoder") or {}
    try:
        added = sorted(
            (int(index), entry["content"], bool(entry.get("special"))) for index, entry in listed.items()
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}/tokenizer_config.json: added_tokens_decoder makes no sense") from None
    for index, content, special in added:
        token = AddedToken(content, special=special, normalized=False)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(content) != index:
            raise CheckpointError(
                f"{path}/tokenizer_config.json: token {content!r} has the id {index}, behind the vocabulary "
                f"comes {tokenizer.token_to_id(content)}: tokenizer and configuration are of different models"
            )
