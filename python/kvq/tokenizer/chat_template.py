"""Renders chat templates: Jinja in a sandbox, with what transformers offers to templates."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvq.errors import ConfigError


class _GenerationTag(Extension):
    """``{% generation %}``: marks the assistant's text for training; renders as its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template.

    Parameters
    ----------
    text : str
        Jinja source.
    bos_token, eos_token : str
        Variables of those names in the template.

    Raises
    ------
    ConfigError
        If the source is not valid Jinja.
    """

    def __init__(self, text: str, bos_token: str = "", eos_token: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateSyntaxError as problem:
            raise ConfigError(f"the chat template is not valid: line {problem.lineno}: {problem}") from None

    def render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation.

        Parameters
        ----------
        messages : list of dict
            Each with ``role`` and ``content``; content in parts (``{"type": "text", ...}``) is joined.
        add_generation_prompt : bool
            Whether the text ends where the assistant's answer begins.
        **variables
            Further variables of the template, such as ``tools``.

        Raises
        ------
        ConfigError
            If the template refuses the messages.
        """
        context = {"tools": None, "documents": None, **self._special, **variables}
        try:
            return self._template.render(
                messages=[_flatten(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **context,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as problem:
            reason = " ".join(str(problem).split())
            raise ConfigError(f"the chat template refuses these messages: {reason}") from None


def _flatten(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text", "") if isinstance(part, dict) else str(part) for part in content]
        return {**message, "content": "".join(parts)}
    return message


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
