"""SentencePiece vocabularies, from ``tokenizer.model`` or from GGUF, as ``tokenizers`` tokenizers.

The file is a protocol buffer of few fields (sentencepiece_model.proto), read here by hand.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from kvq.errors import CheckpointError, ConfigError

#: Types of pieces.
CONTROL, USER_DEFINED, BYTE = 3, 4, 6
_UNIGRAM, _BPE = 1, 2


@dataclass
class SentencePieceModel:
    """A vocabulary and how text is brought into it.

    Attributes
    ----------
    pieces, scores, types : list
        Of each token: its spelling, with U+2581 for a space; its score; its type, 1 for plain text.
    unigram : bool
        Whether the best segmentation is sought, and not merged by scores.
    unknown_id, begin_id : int
        Tokens for what is not in the vocabulary, and for the begin of a text.
    add_prefix : bool
        Whether a space is put in front of a text.
    collapse_spaces : bool
        Whether spaces around a text go, and several become one.
    charsmap : bytes
        Compiled normalization; empty for none.
    """

    pieces: list[str]
    scores: list[float]
    types: list[int]
    unigram: bool = False
    unknown_id: int = 0
    begin_id: int = 1
    add_prefix: bool = True
    collapse_spaces: bool = False
    charsmap: bytes = b""


def parse_sentencepiece(data: bytes, path: Path) -> SentencePieceModel:
    """Read the content of a ``tokenizer.model``.

    Raises
    ------
    CheckpointError
        If it is damaged.
    ConfigError
        If it is of a kind that merges neither pairs nor seeks the best segmentation.
    """
    model = SentencePieceModel([], [], [], collapse_spaces=True)
    kind = _UNIGRAM
    try:
        for field, value in _fields(data):
            if field == 1:
                piece = dict(_fields(_message(value)))
                model.pieces.append(_message(piece.get(1, b"")).decode())
                model.scores.append(struct.unpack("<f", _message(piece.get(2, bytes(4))))[0])
                model.types.append(_number(piece.get(3, 1)))
            elif field == 2:
                trainer = dict(_fields(_message(value)))
                kind = _number(trainer.get(3, _UNIGRAM))
                model.unknown_id = _number(trainer.get(40, 0))
                model.begin_id = _number(trainer.get(41, 1))
            elif field == 3:
                normalizer = dict(_fields(_message(value)))
                model.charsmap = _message(normalizer.get(2, b""))
                model.add_prefix = bool(_number(normalizer.get(3, 1)))
                model.collapse_spaces = bool(_number(normalizer.get(4, 1)))
    except (ValueError, IndexError, struct.error, TypeError, OverflowError):
        raise CheckpointError(f"{path}: the SentencePiece model is damaged: download it again") from None
    if not model.pieces or not 0 <= model.unknown_id < len(model.pieces):
        raise CheckpointError(f"{path}: not a SentencePiece model: it has no vocabulary")
    if kind not in (_UNIGRAM, _BPE):
        raise ConfigError(f"{path}: SentencePiece models of words or characters are not supported")
    model.unigram = kind == _UNIGRAM
    return model


def _message(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError
    return value


def _number(value: int | bytes) -> int:
    """A number; negative ones come as their complement to 2**64."""
    if not isinstance(value, int):
        raise ValueError
    return value - (1 << 64) if value >= 1 << 63 else value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        octet = data[at]
        value |= (octet & 127) << shift
        at, shift = at + 1, shift + 7
        if octet < 128:
            return value, at
        if shift > 63:
            raise ValueError


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message; numbers of fixed size as their bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError
        if at + size > len(data):
            raise ValueError
        yield key >> 3, data[at : at + size]
        at += size


def build_sentencepiece(model: SentencePieceModel, path: Path) -> Tokenizer:
    """Build the tokenizer of a vocabulary; markers are added tokens.

    Raises
    ------
    CheckpointError
        If a piece is there twice.
    """
    vocab = {piece: index for index, piece in enumerate(model.pieces)}
    if len(vocab) != len(model.pieces):
        raise CheckpointError(f"{path}: the vocabulary holds {len(model.pieces) - len(vocab)} tokens twice")
    unknown, fallback = model.pieces[model.unknown_id], BYTE in model.types
    tokenizer = Tokenizer(
        models.Unigram(list(zip(model.pieces, model.scores, strict=True)), model.unknown_id, fallback)
        if model.unigram
        else models.BPE(
            vocab, _merges_of_scores(model), unk_token=unknown, fuse_unk=True, byte_fallback=fallback
        )
    )
    steps: list[Any] = []
    if model.charsmap:
        steps.append(_precompiled(model.charsmap, path))
    if model.collapse_spaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.add_prefix:
        steps.append(normalizers.Prepend("▁"))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    decoding: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.add_prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoding)
    add_markers(tokenizer, model.pieces, model.types)
    return tokenizer


def _precompiled(charsmap: bytes, path: Path) -> Any:
    """The compiled normalization, tried on every character that it may hold."""
    try:
        normalizer = normalizers.Precompiled(charsmap)
        normalizer.normalize_str("".join(map(chr, range(1, 0xD800))))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # the library panics on a damaged table, which is no Exception
        raise CheckpointError(f"{path}: the normalization of the SentencePiece model is damaged") from None
    return normalizer


def add_markers(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Make control tokens special, and tokens of the user whole."""
    for wanted, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind == wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _merges_of_scores(model: SentencePieceModel) -> list[tuple[str, str]]:
    """Merge rules of a vocabulary: the piece with the best score is made first."""
    vocab = {piece: index for index, piece in enumerate(model.pieces)}
    ranked = []
    for piece, index in vocab.items():
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-model.scores[index], index, left, right, cut, piece))
    ranked.sort()
    return [(piece[:cut], piece[cut:]) for *_, cut, piece in ranked]
