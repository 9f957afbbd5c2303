"""Text to token ids and back: the tokenizer of a converted model, and its chat template."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from kvq.chat_template import ChatTemplate
from kvq.config import CHAT_CONFIG_NAME, ChatConfig, read_json
from kvq.errors import ConfigError


class Tokenizer:
    """A tokenizer and the chat template that goes with it.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
        The tokenizer itself.
    chat_template : str, optional
        Jinja text.
    bos_token_id, eos_token_id : int, optional
        Offered to the template as ``bos_token`` and ``eos_token``.

    Raises
    ------
    ConfigError
        If the template is not valid, or the tokenizer is of a kind whose tokens are not bytes.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        chat_template: str | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._bytes = _TokenBytes(tokenizer)
        tokens = [
            "" if index is None else tokenizer.id_to_token(index) or ""
            for index in (bos_token_id, eos_token_id)
        ]
        self._template = ChatTemplate(chat_template, *tokens) if chat_template else None

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Load ``tokenizer.json`` of a directory, with the template and special tokens of its configuration.

        The configuration is ``mlc-chat-config.json``, or ``tokenizer_config.json`` where that is absent.

        Raises
        ------
        ConfigError
            If a file is missing or damaged.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.exists():
            raise ConfigError(f"{file}: no such file: run kvq gen_config first")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as problem:  # the library raises nothing narrower
            raise ConfigError(f"{file}: cannot be read as a tokenizer: {problem}") from None
        if (path / CHAT_CONFIG_NAME).exists():
            config = ChatConfig.load(path)
            eos = config.eos_token_id
            eos = eos[0] if isinstance(eos, list) and eos else eos
            return cls(
                tokenizer,
                config.chat_template,
                config.bos_token_id,
                eos if isinstance(eos, int) else None,
            )
        extra = path / "tokenizer_config.json"
        data = read_json(extra, ConfigError) if extra.exists() else {}
        template = data.get("chat_template")
        ids = []
        for key in ("bos_token", "eos_token"):
            token = data.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            ids.append(tokenizer.token_to_id(token) if token else None)
        return cls(tokenizer, template if isinstance(template, str) else None, *ids)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that stands for something."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def token_id(self, token: str) -> int | None:
        """The id of a token given by its own spelling, or None."""
        index: int | None = self._tokenizer.token_to_id(token)
        return index

    def token(self, index: int) -> str | None:
        """The spelling of a token, or None for an id that stands for nothing."""
        token: str | None = self._tokenizer.id_to_token(index)
        return token

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; markers such as ``<|im_end|>`` become their single ids.

        ``add_special_tokens`` adds what the model expects around a plain text (its begin token), which a
        chat template already contains.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        stream = self.stream(skip_special_tokens)
        return "".join([*(stream.put(index) for index in ids), stream.flush()])

    def stream(self, skip_special_tokens: bool = True) -> StreamDecoder:
        """A decoder for ids that arrive one by one."""
        return StreamDecoder(self._bytes, skip_special_tokens)

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`apply_chat_template` can be used."""
        return self._template is not None

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation, as the model was taught to see it.

        Parameters
        ----------
        messages : list of dict
            Each with ``role`` and ``content``.
        add_generation_prompt : bool
            Whether the text ends where the assistant's answer begins.
        **variables
            Further variables of the template, such as ``tools``.

        Raises
        ------
        ConfigError
            If there is no template, or it refuses the messages.
        """
        if self._template is None:
            raise ConfigError("this model has no chat template: run kvq gen_config with --conv-template")
        return self._template.render(messages, add_generation_prompt, **variables)


class StreamDecoder:
    """Turns ids into text one by one, holding back bytes until they make whole characters.

    A step costs the same however long the text is.
    """

    def __init__(self, token_bytes: _TokenBytes, skip_special_tokens: bool = True) -> None:
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


class _TokenBytes:
    """The bytes that each id of a vocabulary stands for."""

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
