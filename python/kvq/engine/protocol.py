"""Responses in the shapes of OpenAI's API (https://platform.openai.com/docs/api-reference/chat)."""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer

FinishReason = Literal["stop", "length", "tool_calls"]


def _now() -> int:
    return int(time.time())


class PromptTokensDetails(BaseModel):
    """How much of the prompt was in the cache already."""

    cached_tokens: int = 0


class Usage(BaseModel):
    """Token counts; completion tokens include the token that ended an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = Field(default_factory=PromptTokensDetails)


class TopLogprob(BaseModel):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    """A drawn token with the likeliest ones at its place."""

    top_logprobs: list[TopLogprob] = Field(default_factory=list)


class ChoiceLogprobs(BaseModel):
    """Log probabilities of the tokens of a chat choice, or of a chunk of it."""

    content: list[TokenLogprob] = Field(default_factory=list)


class TextLogprobs(BaseModel):
    """Log probabilities of the tokens of a text choice: the lists go side by side."""

    tokens: list[str] = Field(default_factory=list)
    token_logprobs: list[float] = Field(default_factory=list)
    top_logprobs: list[dict[str, float]] = Field(default_factory=list)
    text_offset: list[int] = Field(default_factory=list)


class FunctionCall(BaseModel):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call that the model makes."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class DeltaToolCall(ToolCall):
    """A call in a stream; it comes whole."""

    index: int


class Message(BaseModel):
    """A message of a conversation."""

    role: str
    content: str | None = None
    tool_calls: list[ToolCall] | None = None

    @model_serializer(mode="wrap")
    def _without_no_calls(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        return {key: value for key, value in data.items() if value is not None or key != "tool_calls"}


class Delta(BaseModel):
    """The part of a message that a chunk brings."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[DeltaToolCall] | None = None

    @model_serializer(mode="wrap")
    def _only_what_is_new(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        return {key: value for key, value in data.items() if value is not None}


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: Message
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason


class ChatChunkChoice(BaseModel):
    """A part of one answer."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatCompletion(BaseModel):
    """Answer to ``chat.completions.create(...)``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(default_factory=_now)
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(BaseModel):
    """A part of the answer to ``chat.completions.create(stream=True, ...)``."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int = Field(default_factory=_now)
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class TextChoice(BaseModel):
    """One continuation, or a part of it in a stream."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None


class Completion(BaseModel):
    """Answer to ``completions.create(...)``, and a part of it in a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(default_factory=_now)
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Body of every answer that is an error."""

    error: ErrorDetail


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(default_factory=_now)
    owned_by: str = "kvq"
    max_model_len: int | None = None


class ModelList(BaseModel):
    """The models that are served."""

    object: Literal["list"] = "list"
    data: list[Model]


def new_id(kind: str) -> str:
    """An id such as ``chatcmpl-...`` for a response."""
    return f"{kind}-{uuid.uuid4().hex[:24]}"


def error_body(
    message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error in OpenAI's shape, ready for JSON."""
    return ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code)).model_dump()
