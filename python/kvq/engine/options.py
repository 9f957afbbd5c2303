"""What a request may ask, in OpenAI's names: validated here, for Python callers and for the server."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvq.errors import ConfigError

#: Most answers of one request, prompts times ``n``.
MAX_CHOICES = 128
MAX_STOPS = 16
_FUNCTION_NAME = r"^[\w.-]{1,64}$"


def _check_text(value: Any) -> None:
    """JSON can spell halves of surrogate pairs, which no tokenizer takes."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("a string holds half of a surrogate pair, which is no text") from None
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _check_text(key)
            _check_text(inner)
    elif isinstance(value, list):
        for inner in value:
            _check_text(inner)


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), populate_by_name=True)


class StreamOptions(_Options):
    """What a stream carries beside the answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class FunctionDefinition(_Options):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str = Field(pattern=_FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Options):
    """Something that the model may use."""

    type: Literal["function"]
    function: FunctionDefinition


class _FunctionName(_Options):
    name: str


class NamedTool(_Options):
    """The function that the model must call."""

    type: Literal["function"] = "function"
    function: _FunctionName


class JsonSchemaFormat(_Options):
    """A named JSON schema; always followed strictly."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Options):
    """What an answer must look like.

    ``json_object`` may carry a ``schema`` as MLC-LLM's does. ``regex`` and ``grammar`` (Lark, or GBNF) are no
    part of OpenAI's API.
    """

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | str | None = Field(default=None, alias="schema")
    regex: str | None = None
    grammar: str | None = None


class _CalledFunction(BaseModel):
    name: str
    arguments: str


class _PastCall(BaseModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _CalledFunction


class _TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of a conversation. What answers carry beside these fields is taken and not read."""

    role: str = Field(min_length=1)
    content: str | list[_TextPart] | None = None
    name: str | None = None
    tool_calls: list[_PastCall] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: one text, and arguments as objects.

        Raises
        ------
        ConfigError
            If there is neither content nor a call.
        """
        if self.content is None and not self.tool_calls:
            raise ConfigError(f"every message needs a role and a content: this one of {self.role!r} has none")
        text = (
            "".join(part.text for part in self.content)
            if isinstance(self.content, list)
            else self.content or ""
        )
        out: dict[str, Any] = {"role": self.role, "content": text}
        out |= {key: value for key in ("name", "tool_call_id") if (value := getattr(self, key)) is not None}
        if self.tool_calls:
            out["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        return out


def _call_for_template(call: _PastCall) -> dict[str, Any]:
    try:
        arguments: Any = json.loads(call.function.arguments or "{}")
        _check_text(arguments)
    except ValueError:
        arguments = call.function.arguments
    return {
        "id": call.id,
        "type": call.type,
        "function": {"name": call.function.name, "arguments": arguments},
    }


class CommonOptions(_Options):
    """Options of both kinds of completion; None is the model's own default.

    Those under "taken and not needed" change nothing about an answer here.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    # Taken and not needed.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _all_text(cls, data: Any) -> Any:
        try:
            _check_text(data)
        except RecursionError:
            raise ValueError("the request is nested too deeply") from None
        return data

    @field_validator("logit_bias")
    @classmethod
    def _finite(cls, value: dict[int, float] | None) -> dict[int, float] | None:
        for token, bias in (value or {}).items():
            if not math.isfinite(bias) or abs(bias) > 100:
                raise ValueError(f"{bias} for token {token} is not possible: it must be between -100 and 100")
        return value

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, list) and len(value) > MAX_STOPS:
            raise ValueError(f"{len(value)} strings are too many: at most {MAX_STOPS}")
        return value


class TextOptions(CommonOptions):
    """What ``completions.create`` takes."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    # Taken and not needed: what differs from the default is refused.
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: None = None


class ChatOptions(CommonOptions):
    """What ``chat.completions.create`` takes."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # Taken and not needed.
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None


_Kind = TypeVar("_Kind", bound=CommonOptions)


def parse_options(kind: type[_Kind], options: Mapping[str, Any]) -> _Kind:
    """Options that a Python caller gave.

    Raises
    ------
    ConfigError
        If one is unknown or of a wrong kind.
    """
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        raise ConfigError(describe_problem(error.errors()[0])[1]) from None


def describe_problem(problem: Mapping[str, Any]) -> tuple[str, str]:
    """Key and one line of an entry of ``ValidationError.errors()``."""
    key = ".".join(str(part) for part in problem["loc"])
    kind, message = problem["type"], problem["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        text = f"unknown option {key!r}"
    elif kind == "missing":
        text = f"{key} is missing"
    elif kind == "value_error":
        text = f"{key} {message}"
    else:
        text = f"{key}: {message}, not {problem['input']!r:.80}"
    return key, " ".join(text.split())
