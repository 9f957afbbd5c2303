"""Builds a ``tokenizers`` tokenizer from the vocabulary inside a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvq.errors import CheckpointError, ConfigError

# Values of tokenizer.ggml.token_type.
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


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
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens is missing: the file has no vocabulary")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens holds {len(tokens) - len(vocab)} tokens twice")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, vocab, path)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, vocab, tokens, path)
    else:
        raise ConfigError(f"{path}: tokenizer of kind {kind!r} is not supported: known are gpt2, llama")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, type_ in zip(tokens, types, strict=False)
            if type_ == wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    _add_begin(tokenizer, metadata, tokens, default=kind == "llama")
    return tokenizer


def _byte_level(metadata: dict[str, Any], vocab: dict[str, int], path: Path) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or []]
    name = metadata.get("tokenizer.ggml.pre", "default")
    split: list[Any]
    normalizer = None
    if name in ("llama-bpe", "llama3", "llama-v3"):
        split = [pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated")]
    elif name == "qwen2":
        split, normalizer = [pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated")], normalizers.NFC()
    elif name == "smollm":
        split = [pre_tokenizers.Digits(individual_digits=True)]
    elif name in ("gpt-2", "default"):
        split = []
    else:
        raise ConfigError(
            f"{path}: pre-tokenizer {name!r} is not supported: "
            "known are smollm, llama-bpe, qwen2, gpt-2, default"
        )
    own_regex = name in ("smollm", "gpt-2", "default")
    split.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_regex))
    try:
        # Llama 3 takes a whole word that is in the vocabulary as it is, whatever the merges make of it.
        model = models.BPE(vocab, merges, ignore_merges=name.startswith("llama"))
    except Exception as problem:  # the library raises nothing narrower
        raise CheckpointError(
            f"{path}: tokenizer.ggml.merges does not fit the vocabulary: {problem}"
        ) from None
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    metadata: dict[str, Any], vocab: dict[str, int], tokens: list[str], path: Path
) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise CheckpointError(
            f"{path}: tokenizer.ggml.scores is missing or of another length than the tokens"
        )
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    model = models.BPE(
        vocab, _merges_of_scores(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replace])
        if prefix
        else normalizers.Sequence([replace])
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_of_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Merge rules of a SentencePiece BPE vocabulary: the piece with the best score is made first."""
    ranked = []
    for piece, index in vocab.items():
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], index, left, right, cut, piece))
    ranked.sort()
    return [(piece[:cut], piece[cut:]) for *_, cut, piece in ranked]


def _add_begin(tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str], default: bool) -> None:
    """Let ``encode`` start a text with the begin token, where the file asks for it."""
    begin = metadata.get("tokenizer.ggml.bos_token_id")
    if begin is not None and metadata.get("tokenizer.ggml.add_bos_token", default):
        token = tokens[begin]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[f"{token}:0", "$A:0"],
            pair=[f"{token}:0", "$A:0", "$B:1"],
            special_tokens=[(token, begin)],
        )
