"""Text to token ids and back: the tokenizer of a converted model, and its chat template."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from kvq.config import CHAT_CONFIG_NAME, ChatConfig, read_json
from kvq.errors import ConfigError
from kvq.tokenizer.chat_template import ChatTemplate
from kvq.tokenizer.stream import StreamDecoder, TokenBytes


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
        self._bytes = TokenBytes(tokenizer)
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

    def token_bytes(self, index: int) -> bytes:
        """The bytes that a token stands for; empty for an id that stands for nothing."""
        return self._bytes.of(index)

    def is_special(self, index: int) -> bool:
        """Whether a token is a marker and no text."""
        return self._bytes.is_special(index)

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
