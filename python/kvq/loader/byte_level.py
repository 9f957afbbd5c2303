"""Tokenizers whose tokens are bytes: how each kind splits a text before it merges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvq.errors import CheckpointError, ConfigError

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

#: Names that GGUF gives to ways of splitting.
LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
QWEN2 = ("qwen2", "stablelm2")
_CL100K = ("dbrx", "smaug-bpe")
_DIGITS = ("smollm",)
_GPT2 = ("gpt-2", "olmo", "default")


def build_byte_level(
    vocab: dict[str, int], merges: list[tuple[str, str]], split: str, path: Path
) -> Tokenizer:
    """Build a byte-level BPE tokenizer.

    Parameters
    ----------
    vocab : dict
        Id of each token, spelled in the alphabet of GPT-2.
    merges : list of (str, str)
        What is merged, in this order.
    split : str
        How a text is split: ``llama-bpe``, ``qwen2``, ``smollm`` and so on.
    path : Path
        The file, for messages.

    Raises
    ------
    ConfigError
        If the way of splitting is not known.
    CheckpointError
        If merges and vocabulary do not fit together.
    """
    steps: list[Any] = []
    normalizer = None
    if split in (*LLAMA3, *_CL100K):
        steps = [pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated")]
    elif split in QWEN2:
        steps, normalizer = [pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated")], normalizers.NFC()
    elif split in _DIGITS:
        steps = [pre_tokenizers.Digits(individual_digits=True)]
    elif split not in _GPT2:
        known = ", ".join((*_DIGITS, *LLAMA3[:1], *QWEN2, *_CL100K, *_GPT2))
        raise ConfigError(f"{path}: pre-tokenizer {split!r} is not supported: known are {known}")
    own_regex = split in (*_DIGITS, *_GPT2)
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_regex))
    try:
        # Llama 3 takes a whole word that is in the vocabulary as it is, whatever the merges make of it.
        model = models.BPE(vocab, merges, ignore_merges=split in LLAMA3)
    except Exception as problem:  # the library raises nothing narrower
        raise CheckpointError(f"{path}: the merges do not fit the vocabulary: {problem}") from None
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
