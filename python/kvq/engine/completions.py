"""``chat.completions.create`` and ``completions.create``: OpenAI's options in, OpenAI's shapes out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

from kvq.config import ChatConfig
from kvq.engine.answers import Answer, Part, Whole
from kvq.engine.ask import Asker
from kvq.engine.driver import Driver
from kvq.engine.options import ChatOptions, CommonOptions, TextOptions, parse_options
from kvq.engine.protocol import ChatCompletion, ChatCompletionChunk, Completion
from kvq.tokenizer import Tokenizer


class Completions:
    """``completions.create(...)``: text goes on from a prompt."""

    def __init__(self, driver: Driver, tokenizer: Tokenizer, config: ChatConfig, model_name: str) -> None:
        self._driver = driver
        self.ask = Asker(tokenizer, config, model_name, driver.check)

    @overload
    def create(
        self, *, prompt: str | Sequence[Any], stream: Literal[False] = ..., **options: Any
    ) -> Completion: ...

    @overload
    def create(
        self, *, prompt: str | Sequence[Any], stream: Literal[True], **options: Any
    ) -> Iterator[Completion]: ...

    def create(
        self, *, prompt: str | Sequence[Any], stream: bool = False, **options: Any
    ) -> Completion | Iterator[Completion]:
        """Continue a prompt, or several.

        Parameters
        ----------
        prompt : str or sequence
            Text, or token ids, or a sequence of either: ``n`` choices of each, in order.
        stream : bool
            Return an iterator of parts; ``stream_options={"include_usage": True}`` adds one with the usage.
            Closing it cancels the answer.
        **options
            The fields of :class:`kvq.engine.options.TextOptions`: ``max_tokens temperature top_p top_k min_p
            seed stop n logprobs response_format repetition_penalty presence_penalty frequency_penalty
            logit_bias ignore_eos``.

        Raises
        ------
        ConfigError
            If an option is unknown or impossible, or the prompt does not fit.
        EngineError
            If the engine had to end an answer.
        """
        given = {"prompt": _plain(prompt), "stream": stream, **options}
        asked = parse_options(TextOptions, given)
        return run(self._driver, self.ask.text(asked), asked)


class ChatCompletions:
    """``chat.completions.create(...)``: the next message of a conversation."""

    def __init__(self, completions: Completions) -> None:
        self._driver, self._ask = completions._driver, completions.ask

    @overload
    def create(
        self, *, messages: Sequence[Mapping[str, Any]], stream: Literal[False] = ..., **options: Any
    ) -> ChatCompletion: ...

    @overload
    def create(
        self, *, messages: Sequence[Mapping[str, Any]], stream: Literal[True], **options: Any
    ) -> Iterator[ChatCompletionChunk]: ...

    def create(
        self, *, messages: Sequence[Mapping[str, Any]], stream: bool = False, **options: Any
    ) -> ChatCompletion | Iterator[ChatCompletionChunk]:
        """Answer a conversation.

        Parameters
        ----------
        messages : sequence of mappings
            Each with ``role`` and ``content``, or the calls of an earlier answer.
        stream : bool
            As of :meth:`Completions.create`.
        **options
            The fields of :class:`kvq.engine.options.ChatOptions`: those of :meth:`Completions.create`,
            ``max_completion_tokens``, ``logprobs`` (bool) with ``top_logprobs``, and ``tools`` with
            ``tool_choice`` and ``parallel_tool_calls``.

        Raises
        ------
        ConfigError
            If an option is unknown or impossible, or the conversation does not fit.
        EngineError
            If the engine had to end an answer.
        """
        given = {"messages": _plain(messages), "stream": stream, **options}
        asked = parse_options(ChatOptions, given)
        return run(self._driver, self._ask.chat(asked), asked)


class Chat:
    """Carries ``completions``, as OpenAI's client does."""

    def __init__(self, completions: Completions) -> None:
        self.completions = ChatCompletions(completions)


def _plain(values: Any) -> Any:
    """Any sequence, arrays among them, as the list that JSON would bring."""
    return list(values) if isinstance(values, Iterable) and not isinstance(values, str) else values


def run(driver: Driver, answer: Answer[Whole, Part], options: CommonOptions) -> Whole | Iterator[Part]:
    """Run the requests of an answer: to the end, or part by part if a stream was asked for."""
    if options.stream:
        return _stream(driver, answer, options)
    for index, piece in driver.run(answer.requests):
        answer.feed(index, piece)
    return answer.whole()


def _stream(driver: Driver, answer: Answer[Whole, Part], options: CommonOptions) -> Iterator[Part]:
    with contextlib.closing(driver.run(answer.requests)) as pieces:
        for index, piece in pieces:
            part = answer.feed(index, piece)
            if part is not None:
                yield part
    if options.stream_options and options.stream_options.include_usage:
        yield answer.usage_part()
