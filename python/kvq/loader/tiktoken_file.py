"""Tokenizers in tiktoken's format, a line a token: its bytes in base64 and its rank.

So Meta publishes Llama 3's (``tokenizer.model``) and Qwen its first (``*.tiktoken``). The file names neither
markers nor the way a text is split: both are known by its kind.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from kvq.errors import CheckpointError
from kvq.loader.byte_level import LLAMA3, QWEN2, build_byte_level

_LLAMA3_MARKERS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
)
_QWEN_MARKERS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|extra_{i}|>" for i in range(205)),
)


def is_tiktoken(data: bytes) -> bool:
    """Whether a file is in this format."""
    try:
        return bool(data) and len(_parse_line(data.split(b"\n", 1)[0])) == 2
    except ValueError:
        return False


def build_tiktoken(data: bytes, path: Path) -> Tokenizer:
    """Build the tokenizer of a file, Llama 3's markers behind its tokens, or Qwen's in a ``.tiktoken`` file.

    Raises
    ------
    CheckpointError
        If a line is damaged, or ranks are not those of one token after another.
    """
    try:
        ranks = dict(_parse_line(line) for line in data.splitlines() if line)
    except ValueError:
        raise CheckpointError(f"{path}: not a tokenizer in tiktoken's format: download it again") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([i]) not in ranks for i in range(256)):
        raise CheckpointError(f"{path}: a rank or one of the 256 bytes is missing: download the file again")
    markers, split = (_QWEN_MARKERS, QWEN2[0]) if path.suffix == ".tiktoken" else (_LLAMA3_MARKERS, LLAMA3[0])
    spelled = _alphabet()
    vocab = {_spell(token, spelled): rank for token, rank in ranks.items()}
    merges = [(_spell(left, spelled), _spell(right, spelled)) for left, right in _merges(ranks)]
    tokenizer = build_byte_level(vocab, merges, split, path)
    tokenizer.add_special_tokens([AddedToken(marker, normalized=False) for marker in markers])
    return tokenizer


def _parse_line(line: bytes) -> tuple[bytes, int]:
    token, rank = line.split()
    try:
        return base64.b64decode(token, validate=True), int(rank)
    except binascii.Error:
        raise ValueError from None


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The two parts from which each token is made, in the order of ranks."""
    out = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = _parts(token, rank, ranks)
            if len(parts) == 2:  # a token that no merge reaches is only ever taken whole
                out.append((parts[0], parts[1]))
    return out


def _parts(token: bytes, limit: int, ranks: dict[bytes, int]) -> list[bytes]:
    """What merging by ranks below ``limit`` makes of the bytes of a token."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], limit))
        if ranks.get(parts[best] + parts[best + 1], limit) >= limit:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def _alphabet() -> list[str]:
    """Character of each byte in the alphabet of GPT-2: printable Latin-1 as is, the rest from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = (value for value in range(256) if value not in printable)
    others = {value: chr(0x100 + i) for i, value in enumerate(rest)}
    return [others.get(value, chr(value)) for value in range(256)]


def _spell(token: bytes, spelled: list[str]) -> str:
    return "".join(spelled[value] for value in token)
