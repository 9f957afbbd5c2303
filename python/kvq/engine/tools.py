"""Tool calls: how each family of chat templates writes them, read from answers as they stream.

A family says how a call looks (for the grammar of a call that is demanded) and how it is found in text.
Text that may still become a call is held back; a call is handed out whole.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvq.engine.stop import overlap
from kvq.engine.structured import guided

#: Spells a text for a Lark rule, markers as token ids.
Spell = Callable[[str], str]

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_DECODER = json.JSONDecoder()
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ParsedCall:
    """A call found in an answer; ``arguments`` is JSON text."""

    name: str
    arguments: str
    id: str


@dataclass
class Found:
    """What a piece of text brought: plain text, and calls that it completed."""

    text: str = ""
    calls: list[ParsedCall] = field(default_factory=list)


class ToolParser(Protocol):
    """Finds calls in text that arrives in pieces."""

    def put(self, text: str) -> Found:
        """Take a piece."""

    def flush(self) -> Found:
        """The text ends; what is no call comes out as text."""


@dataclass(frozen=True)
class ToolFormat:
    """How one family writes tool calls.

    Attributes
    ----------
    name : str
    markers : tuple of str
        Tokens that are part of a call though they are no text.
    parser : callable
        Makes a :class:`ToolParser`.
    rule : callable
        Lark rule of one call, from a function's name, its parameters and a function that spells markers.
    between, start, end : str
        Texts between calls, and around all of them; markers are spelled out.
    """

    name: str
    markers: tuple[str, ...]
    parser: Callable[[], ToolParser]
    rule: Callable[[str, str, Spell], str]
    between: str
    start: str = ""
    end: str = ""

    def grammar(
        self, functions: Sequence[Mapping[str, Any]], parallel: bool, special: Mapping[str, int]
    ) -> str:
        """Lark text of one call, or of one or more, of the given functions.

        Parameters
        ----------
        functions : sequence of mappings
            Each with ``name`` and, if it takes any, ``parameters`` (a JSON schema).
        parallel : bool
            Whether several calls may follow one another.
        special : mapping of str to int
            Ids of markers that are tokens of the model.
        """

        def spell(text: str) -> str:
            for marker in self.markers:
                if marker in special and marker in text:
                    before, after = text.split(marker, 1)
                    parts = [spell(before), f"<[{special[marker]}]>", spell(after)]
                    return " ".join(part for part in parts if part)
            return json.dumps(text, ensure_ascii=False) if text else ""

        names = [f"call_{i}" for i in range(len(functions))]
        rules = []
        for rule, function in zip(names, functions, strict=True):
            schema = function.get("parameters")
            schema = _NO_PARAMETERS if schema is None else schema
            rules.append(f"{rule}: {self.rule(function['name'], json.dumps(guided(schema)), spell)}")
        more = f"({spell(self.between)} call)*" if parallel else ""
        start = " ".join(part for part in (spell(self.start), "call", more, spell(self.end)) if part)
        return "\n".join([f"start: {start}", f"call: {' | '.join(names)}", *rules, ""])


def format_of(chat_template: str | None) -> ToolFormat | None:
    """How a chat template has tool calls written; None if it has none, or in a way that is not known here."""
    if not chat_template or "tools" not in chat_template:
        return None
    if "<function=" in chat_template or "<arg_key>" in chat_template:
        return None  # Qwen3-Coder's and GLM's: arguments as XML, between the marks of Hermes
    if "[TOOL_CALLS]" in chat_template:
        return MISTRAL_NAMED if "[ARGS]" in chat_template else MISTRAL
    if "<tool_call>" in chat_template:
        return HERMES
    if re.search(r'"parameters\\?":', chat_template) and "ipython" in chat_template:
        return LLAMA3
    return None


class _Marked:
    """Text, then something between a marker and an end; the subclass reads what stands there.

    Parameters
    ----------
    marker : str
        Begins a call or a list of calls.
    end : str or None
        Ends it; None if only the end of the answer does.
    read : callable
        Calls in the text between; None if it is no call.
    """

    def __init__(
        self, marker: str, end: str | None, read: Callable[[str], list[tuple[str, Any]] | None]
    ) -> None:
        self._marker, self._end, self._read = marker, end, read
        self._held = ""
        self._inside = False

    def put(self, text: str) -> Found:
        self._held += text
        found = Found()
        while True:
            if not self._inside:
                at = self._held.find(self._marker)
                if at < 0:
                    keep = overlap(self._held, self._marker)
                    cut = len(self._held) - keep
                    # Space before a call belongs to the call.
                    cut = len(self._held[:cut].rstrip())
                    found.text += self._held[:cut]
                    self._held = self._held[cut:]
                    return found
                found.text += self._held[:at].rstrip()
                self._held, self._inside = self._held[at + len(self._marker) :], True
            if self._end is None or (at := self._held.find(self._end)) < 0:
                return found
            inner, self._held, self._inside = self._held[:at], self._held[at + len(self._end) :], False
            self._add(found, inner, self._marker + inner + self._end)

    def flush(self) -> Found:
        found = Found()
        if self._inside:
            self._add(found, self._held, self._marker + self._held)
        elif self._held.strip():
            found.text = self._held
        self._held, self._inside = "", False
        return found

    def _add(self, found: Found, inner: str, raw: str) -> None:
        calls = self._read(inner)
        if calls is None:
            found.text += raw
        else:
            found.calls += [_call(name, arguments) for name, arguments in calls]


class _Llama3:
    """The answer is calls from its first character on, or it is none."""

    def __init__(self) -> None:
        self._held: str | None = ""

    def put(self, text: str) -> Found:
        if self._held is None:
            return Found(text)
        self._held += text
        start = self._held.lstrip()
        if not start or start.startswith("{") or _PYTHON_TAG.startswith(start[: len(_PYTHON_TAG)]):
            return Found()
        held, self._held = self._held, None
        return Found(held)

    def flush(self) -> Found:
        held, self._held = self._held or "", None
        calls = _read_llama3(held.strip().removeprefix(_PYTHON_TAG))
        if calls is None:
            return Found(held)
        return Found(calls=[_call(name, arguments) for name, arguments in calls])


_PYTHON_TAG = "<|python_tag|>"


def _read_object(text: str) -> list[tuple[str, Any]] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    call = _name_and_arguments(value)
    return None if call is None else [call]


def _read_list(text: str) -> list[tuple[str, Any]] | None:
    try:
        values, _ = _DECODER.raw_decode(text.lstrip())
    except ValueError:
        return None
    calls = [_name_and_arguments(value) for value in (values if isinstance(values, list) else [values])]
    return [call for call in calls if call is not None] if calls and None not in calls else None


def _read_named(text: str) -> list[tuple[str, Any]] | None:
    """``name[ARGS]{...}``, several with ``[TOOL_CALLS]`` between them."""
    calls: list[tuple[str, Any]] = []
    for part in text.split("[TOOL_CALLS]"):
        name, brace, rest = part.partition("{")
        name = name.strip().removesuffix("[ARGS]").strip()
        try:
            arguments, _ = _DECODER.raw_decode(brace + rest)
        except ValueError:
            return None
        if not name:
            return None
        calls.append((name, arguments))
    return calls


def _read_llama3(text: str) -> list[tuple[str, Any]] | None:
    """Objects with ``; `` between them."""
    calls: list[tuple[str, Any]] = []
    rest = text.strip()
    while rest:
        try:
            value, end = _DECODER.raw_decode(rest)
        except ValueError:
            return None
        call = _name_and_arguments(value)
        if call is None:
            return None
        calls.append(call)
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return calls or None


def _name_and_arguments(value: Any) -> tuple[str, Any] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    return value["name"], value.get("arguments", value.get("parameters", {}))


def _call(name: str, arguments: Any) -> ParsedCall:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    # Mistral's templates refuse ids that are not nine letters and digits; nobody else minds.
    return ParsedCall(name, text, "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9)))


def _opening(name: str, key: str) -> str:
    return f'{{"name": {json.dumps(name)}, "{key}": '


def _hermes_rule(name: str, schema: str, spell: Spell) -> str:
    before, after = "<tool_call>\n" + _opening(name, "arguments"), "}\n</tool_call>"
    return f"{spell(before)} %json {schema} {spell(after)}"


def _mistral_rule(name: str, schema: str, spell: Spell) -> str:
    return f"{spell(_opening(name, 'arguments'))} %json {schema} {spell('}')}"


def _mistral_named_rule(name: str, schema: str, spell: Spell) -> str:
    return f"{spell(f'[TOOL_CALLS]{name}[ARGS]')} %json {schema}"


def _llama3_rule(name: str, schema: str, spell: Spell) -> str:
    return f"{spell(_opening(name, 'parameters'))} %json {schema} {spell('}')}"


HERMES = ToolFormat(
    "hermes",
    ("<tool_call>", "</tool_call>"),
    lambda: _Marked("<tool_call>", "</tool_call>", _read_object),
    _hermes_rule,
    between="\n",
)
MISTRAL = ToolFormat(
    "mistral",
    ("[TOOL_CALLS]",),
    lambda: _Marked("[TOOL_CALLS]", None, _read_list),
    _mistral_rule,
    between=", ",
    start="[TOOL_CALLS] [",
    end="]",
)
MISTRAL_NAMED = ToolFormat(
    "mistral-named",
    ("[TOOL_CALLS]", "[ARGS]"),
    lambda: _Marked("[TOOL_CALLS]", None, _read_named),
    _mistral_named_rule,
    between="",
)
LLAMA3 = ToolFormat("llama3", (_PYTHON_TAG,), _Llama3, _llama3_rule, between="; ")
