"""From the pieces that an engine brings to responses in OpenAI's shapes, whole or as a stream.

Nothing here runs a model: a caller feeds pieces, from a thread or from an event loop.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvq.engine.protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChoiceLogprobs,
    Completion,
    Delta,
    DeltaToolCall,
    FunctionCall,
    Message,
    PromptTokensDetails,
    TextChoice,
    TextLogprobs,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    Usage,
    new_id,
)
from kvq.engine.request import Piece, Request
from kvq.engine.tools import Found, ParsedCall, ToolFormat
from kvq.errors import EngineError
from kvq.runtime.sampler import SampledToken
from kvq.tokenizer import Tokenizer

Whole = TypeVar("Whole", ChatCompletion, Completion)
Part = TypeVar("Part", ChatCompletionChunk, Completion)

#: JSON of a text, and a text that stands for others in a frame of :meth:`Answer.feed_json`.
_encode = json.JSONEncoder(ensure_ascii=False).encode
_HOLE = "\0text\0"


@dataclass
class _Choice:
    """One choice so far."""

    texts: list[str] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    calls: list[ParsedCall] = field(default_factory=list)
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: Any = None
    #: JSON of a part that brings text alone, before and after the text; made when it is first needed.
    frame: tuple[str, str] | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Answer(Generic[Whole, Part]):
    """The answer to a request: feed it the pieces of every choice, take parts or the whole.

    Parameters
    ----------
    requests : sequence of Request
        One for each choice; ``n`` of a prompt stand side by side.
    n : int
        Choices of a prompt.
    top_logprobs : int, optional
        As in the requests.
    """

    kind: str

    def __init__(
        self, requests: Sequence[Request], n: int, tokenizer: Tokenizer, model: str, top_logprobs: int | None
    ) -> None:
        self.requests = list(requests)
        self.id, self.model = new_id(self.kind), model
        self._n, self._tokenizer, self._top_logprobs = n, tokenizer, top_logprobs
        self._choices = [_Choice() for _ in requests]

    def feed(self, index: int, piece: Piece) -> Part | None:
        """Take a piece of choice ``index``; the part that a stream sends for it, if there is one.

        Raises
        ------
        EngineError
            If the engine had to end the answer.
        """
        raise NotImplementedError

    def feed_json(self, index: int, piece: Piece) -> str | None:
        """As :meth:`feed`, and the part as JSON.

        Nearly every part brings text and nothing else. A model of it is made once for a choice, and then only
        the text is put in.

        Raises
        ------
        EngineError
            As :meth:`feed`.
        """
        if piece.finish_reason is not None or not self._brings_text_alone(index):
            part = self.feed(index, piece)
            return None if part is None else part.model_dump_json()
        choice = self._take(index, piece)
        choice.texts.append(piece.text)
        if choice.frame is None:
            head, _, tail = self._text_part(index, _HOLE).model_dump_json().partition(_encode(_HOLE))
            choice.frame = head, tail
        head, tail = choice.frame
        return head + _encode(piece.text) + tail

    def _brings_text_alone(self, index: int) -> bool:
        """Whether the next part of a choice, if it is not its last, has a text and nothing else."""
        raise NotImplementedError

    def _text_part(self, index: int, text: str) -> Part:
        """A part with a text and nothing else."""
        raise NotImplementedError

    def whole(self) -> Whole:
        """The response, when every choice has had its last piece."""
        raise NotImplementedError

    def usage_part(self) -> Part:
        """The last part of a stream that was asked for usage."""
        raise NotImplementedError

    @property
    def usage(self) -> Usage:
        """Tokens so far; a prompt counts once, however many choices it has."""
        firsts = range(0, len(self.requests), self._n)
        prompt = sum(len(self.requests[i].prompt) for i in firsts)
        completion = sum(choice.completion_tokens for choice in self._choices)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(self._choices[i].cached_tokens for i in firsts)
            ),
        )

    def _take(self, index: int, piece: Piece) -> _Choice:
        if piece.finish_reason in ("error", "abort"):
            raise EngineError(piece.error or "the answer was cancelled")
        choice = self._choices[index]
        if piece.token is not None:
            choice.completion_tokens += 1
            if self._top_logprobs is not None:
                choice.tokens.append(piece.token)
        if piece.stats is not None:
            choice.cached_tokens = piece.stats.cached_tokens
        choice.finish_reason = piece.finish_reason
        return choice

    def _spell(self, index: int) -> str:
        return self._tokenizer.decode([index], skip_special_tokens=False)


class ChatAnswer(Answer[ChatCompletion, ChatCompletionChunk]):
    """The answer to ``chat.completions.create``.

    Parameters
    ----------
    tools : ToolFormat, optional
        How the model writes calls, if it may make any.
    """

    kind = "chatcmpl"

    def __init__(
        self,
        requests: Sequence[Request],
        n: int,
        tokenizer: Tokenizer,
        model: str,
        top_logprobs: int | None,
        tools: ToolFormat | None = None,
    ) -> None:
        super().__init__(requests, n, tokenizer, model, top_logprobs)
        self._parsers = [tools.parser() if tools else None for _ in requests]
        ids = {tokenizer.token_id(marker): marker for marker in tools.markers} if tools else {}
        self._markers = {
            index: text for index, text in ids.items() if index is not None and tokenizer.is_special(index)
        }
        self._begun = [False] * len(self.requests)

    def feed(self, index: int, piece: Piece) -> ChatCompletionChunk | None:
        choice = self._take(index, piece)
        found = self._parse(index, piece)
        first_call = len(choice.calls)
        choice.texts.append(found.text)
        choice.calls += found.calls
        if choice.calls and piece.finish_reason == "stop":
            choice.finish_reason = "tool_calls"
        held = self._parsers[index] is not None and not found.text and not found.calls
        if held and piece.finish_reason is None and self._begun[index] and self._top_logprobs is None:
            return None
        calls = [
            DeltaToolCall(index=i, **_tool_call(call).model_dump())
            for i, call in enumerate(found.calls, first_call)
        ]
        delta = Delta(
            role=None if self._begun[index] else "assistant",
            content=None if calls and not found.text else found.text,
            tool_calls=calls or None,
        )
        self._begun[index] = True
        return self._part(
            index, delta, self._logprobs([piece.token] if piece.token else []), choice.finish_reason
        )

    def _brings_text_alone(self, index: int) -> bool:
        return self._begun[index] and self._top_logprobs is None and self._parsers[index] is None

    def _text_part(self, index: int, text: str) -> ChatCompletionChunk:
        return self._part(index, Delta(content=text))

    def _part(
        self, index: int, delta: Delta, logprobs: ChoiceLogprobs | None = None, finish_reason: Any = None
    ) -> ChatCompletionChunk:
        shown = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return ChatCompletionChunk(id=self.id, model=self.model, choices=[shown])

    def whole(self) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=index,
                message=Message(
                    role="assistant",
                    content=choice.text or (None if choice.calls else ""),
                    tool_calls=[_tool_call(call) for call in choice.calls] or None,
                ),
                logprobs=self._logprobs(choice.tokens),
                finish_reason=choice.finish_reason,
            )
            for index, choice in enumerate(self._choices)
        ]
        return ChatCompletion(id=self.id, model=self.model, choices=choices, usage=self.usage)

    def usage_part(self) -> ChatCompletionChunk:
        return ChatCompletionChunk(id=self.id, model=self.model, choices=[], usage=self.usage)

    def _parse(self, index: int, piece: Piece) -> Found:
        parser = self._parsers[index]
        if parser is None:
            return Found(piece.text)
        # A marker that is a token of its own is no text, yet the parser has to see it.
        marker = self._markers.get(piece.token.id, "") if piece.token else ""
        found = parser.put(piece.text + marker)
        if piece.finish_reason is not None:
            rest = parser.flush()
            found = Found(found.text + rest.text, found.calls + rest.calls)
        return found

    def _logprobs(self, tokens: Sequence[SampledToken]) -> ChoiceLogprobs | None:
        if self._top_logprobs is None:
            return None
        content = []
        for token in tokens:
            if token.logprob is not None:
                top = [TopLogprob(**self._named(index, value)) for index, value in token.top]
                content.append(TokenLogprob(**self._named(token.id, token.logprob), top_logprobs=top))
        return ChoiceLogprobs(content=content)

    def _named(self, index: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._spell(index),
            "logprob": logprob,
            "bytes": list(self._tokenizer.token_bytes(index)),
        }


class TextAnswer(Answer[Completion, Completion]):
    """The answer to ``completions.create``."""

    kind = "cmpl"

    def feed(self, index: int, piece: Piece) -> Completion:
        choice = self._take(index, piece)
        logprobs = None
        if self._top_logprobs is not None:
            offset = sum(map(len, choice.texts))
            logprobs = self._logprobs([piece.token] if piece.token else [], offset)
        choice.texts.append(piece.text)
        return self._part(index, piece.text, logprobs, choice.finish_reason)

    def _brings_text_alone(self, index: int) -> bool:
        return self._top_logprobs is None

    def _text_part(self, index: int, text: str) -> Completion:
        return self._part(index, text)

    def _part(
        self, index: int, text: str, logprobs: TextLogprobs | None = None, finish_reason: Any = None
    ) -> Completion:
        shown = TextChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason)
        return Completion(id=self.id, model=self.model, choices=[shown])

    def whole(self) -> Completion:
        choices = [
            TextChoice(
                index=index,
                text=choice.text,
                logprobs=self._logprobs(choice.tokens, 0),
                finish_reason=choice.finish_reason,
            )
            for index, choice in enumerate(self._choices)
        ]
        return Completion(id=self.id, model=self.model, choices=choices, usage=self.usage)

    def usage_part(self) -> Completion:
        return Completion(id=self.id, model=self.model, choices=[], usage=self.usage)

    def _logprobs(self, tokens: Sequence[SampledToken], offset: int) -> TextLogprobs | None:
        if self._top_logprobs is None:
            return None
        out = TextLogprobs()
        for token in tokens:
            if token.logprob is None:
                continue
            text = self._spell(token.id)
            out.tokens.append(text)
            out.token_logprobs.append(token.logprob)
            out.top_logprobs.append({self._spell(index): value for index, value in token.top})
            out.text_offset.append(offset)
            offset += len(text)
        return out


def _tool_call(call: ParsedCall) -> ToolCall:
    return ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
