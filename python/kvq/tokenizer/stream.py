"""Token ids to bytes to text, one id at a time."""

from __future__ import annotations

import codecs
import json
from typing import Any

import tokenizers

from kvq.errors import ConfigError


class TokenBytes:
    """The bytes that each id of a vocabulary stands for.

    Attributes
    ----------
    strip_first_space : bool
        Whether a space that starts a text is the tokenizer's own addition.

    Raises
    ------
    ConfigError
        If the tokenizer is of a kind whose tokens are not bytes.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        description = json.loads(tokenizer.to_str())
        steps = _flatten_steps(description.get("decoder"))
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self.strip_first_space = any(
            (step["type"] == "Strip" and step.get("start"))
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )
        if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
            raise ConfigError(
                f"the tokenizer decodes by {', '.join(sorted(kinds)) or 'nothing'}: "
                "only ByteLevel, ByteFallback and Metaspace are supported"
            )
        self._added = tokenizer.get_added_tokens_decoder()
        self._known: dict[int, bytes] = {}

    def is_special(self, index: int) -> bool:
        """Whether an id is a marker and no text."""
        return index in self._added and bool(self._added[index].special)

    def of(self, index: int) -> bytes:
        """The bytes of an id; empty for an id that stands for nothing."""
        if index not in self._known:
            self._known[index] = self._compute(index)
        return self._known[index]

    def _compute(self, index: int) -> bytes:
        token = self._tokenizer.id_to_token(index)
        if token is None:
            return b""
        if self._byte_level:
            values = [_BYTE_OF_CHAR.get(char) for char in token]
            if None not in values:
                return bytes(value for value in values if value is not None)
            return str(token).encode()
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return str(token).replace("▁", " ").encode()


class StreamDecoder:
    """Turns ids into text one by one, holding back bytes until they make whole characters.

    A step costs the same however long the text is.
    """

    def __init__(self, token_bytes: TokenBytes, skip_special_tokens: bool = True) -> None:
        self._bytes = token_bytes
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = True

    def put(self, index: int) -> str:
        """The text that is certain once ``index`` is known; empty inside a character."""
        if self._skip and self._bytes.is_special(index):
            return ""
        data = self._bytes.of(index)
        if self._at_start and data:
            self._at_start = False
            if self._bytes.strip_first_space and data.startswith(b" "):
                data = data[1:]
        return self._utf8.decode(data)

    def flush(self) -> str:
        """The end of the text: U+FFFD if a character was left unfinished."""
        return self._utf8.decode(b"", final=True)


def _flatten_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if not decoder:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten_steps(inner)]
    return [decoder]


def _byte_alphabet() -> dict[str, int]:
    """Byte of each character of the GPT-2 byte alphabet: printable Latin-1 as is, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    out = {chr(value): value for value in printable}
    rest = [value for value in range(256) if value not in set(printable)]
    out.update({chr(0x100 + i): value for i, value in enumerate(rest)})
    return out


_BYTE_OF_CHAR = _byte_alphabet()
