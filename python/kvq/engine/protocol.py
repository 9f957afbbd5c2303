"""Responses in the shapes of OpenAI's API (https://platform.openai.com/docs/api-reference/chat)."""

from __future__ import annotations

import time
import uuid
from typing import Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length"]


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
    """Log probabilities of the tokens of a choice, or of a chunk of it."""

    content: list[TokenLogprob] = Field(default_factory=list)


class Message(BaseModel):
    """A message of a conversation."""

    role: str
    content: str | None = None


class Delta(BaseModel):
    """The part of a message that a chunk brings."""

    role: str | None = None
    content: str | None = None


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
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason | None = None


class Completion(BaseModel):
    """Answer to ``completions.create(...)``, and a part of it in a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(default_factory=_now)
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None


def new_id(kind: str) -> str:
    """An id such as ``chatcmpl-...`` for a response."""
    return f"{kind}-{uuid.uuid4().hex[:24]}"
