"""``chat.completions.create`` and ``completions.create``: OpenAI's options in, OpenAI's shapes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, overload

from kvq.config import ChatConfig
from kvq.engine.core import EngineCore, Piece, Request
from kvq.engine.protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChoiceLogprobs,
    Completion,
    Delta,
    Message,
    PromptTokensDetails,
    TextChoice,
    TokenLogprob,
    TopLogprob,
    Usage,
    new_id,
)
from kvq.errors import ConfigError
from kvq.runtime.sampler import SampledToken, SamplingParams
from kvq.tokenizer import Tokenizer

_Chunk = TypeVar("_Chunk", ChatCompletionChunk, Completion)


@dataclass
class _Answer:
    """One finished choice."""

    text: str = ""
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Any = None


class Completions:
    """``completions.create(...)``: text goes on from a prompt."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer, config: ChatConfig, model_name: str) -> None:
        self._core, self._tokenizer, self._config = core, tokenizer, config
        self.model_name = model_name

    @overload
    def create(
        self, *, prompt: str | Sequence[int], stream: Literal[False] = ..., **options: Any
    ) -> Completion: ...

    @overload
    def create(
        self, *, prompt: str | Sequence[int], stream: Literal[True], **options: Any
    ) -> Iterator[Completion]: ...

    def create(
        self,
        *,
        prompt: str | Sequence[int],
        stream: bool = False,
        stream_options: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        **options: Any,
    ) -> Completion | Iterator[Completion]:
        """Continue a prompt.

        Parameters
        ----------
        prompt : str or sequence of int
            Text, or token ids.
        stream : bool
            Return an iterator of parts; ``stream_options={"include_usage": True}`` adds one with the usage.
        logprobs : int, optional
            Report the log probability of each token and of so many likeliest ones.
        **options
            ``max_tokens temperature top_p top_k min_p seed stop n repetition_penalty presence_penalty
            frequency_penalty logit_bias ignore_eos``.

        Raises
        ------
        KvqError
            If an option is unknown or impossible, or the prompt does not fit.
        """
        ids = (
            self._tokenizer.encode(prompt, add_special_tokens=True)
            if isinstance(prompt, str)
            else list(prompt)
        )
        requests = self.requests(ids, top_logprobs=logprobs, **options)
        empty = Completion(id=new_id("cmpl"), model=self.model_name, choices=[])
        if stream:

            def part(choice: int, piece: Piece, _first: bool) -> Completion:
                shown = TextChoice(
                    index=choice,
                    text=piece.text,
                    logprobs=self.logprobs_of([piece.token], logprobs),
                    finish_reason=piece.finish_reason,
                )
                return empty.model_copy(update={"choices": [shown]})

            return self.stream(requests, part, empty if _wants_usage(stream_options) else None)
        answers, usage = self.collect(requests, logprobs)
        choices = [
            TextChoice(index=i, text=a.text, logprobs=a.logprobs, finish_reason=a.finish_reason)
            for i, a in enumerate(answers)
        ]
        return empty.model_copy(update={"choices": choices, "usage": usage})

    # ---- shared with chat ----------------------------------------------------------------------
    def requests(
        self,
        ids: list[int],
        *,
        top_logprobs: int | None = None,
        max_tokens: int | None = None,
        max_completion_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        n: int = 1,
        ignore_eos: bool = False,
        logit_bias: Mapping[Any, float] | None = None,
        **sampling: Any,
    ) -> list[Request]:
        """One request for each of ``n`` choices; what is not given has the model's own default."""
        limit = max_tokens if max_completion_tokens is None else max_completion_tokens
        if limit is not None and limit < 1:
            raise ConfigError(f"max_tokens {limit} is not possible: it must be at least 1")
        if n < 1:
            raise ConfigError(f"n {n} is not possible: it must be at least 1")
        config = self._config
        names = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        known = {*names, "top_k", "min_p", "seed"}
        unknown = sorted(set(sampling) - known)
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]!r}: known are {', '.join(sorted(known))}")
        values = {name: getattr(config, name) for name in names}
        values.update({name: value for name, value in sampling.items() if value is not None})
        try:
            bias = {int(token): float(value) for token, value in (logit_bias or {}).items()}
        except (TypeError, ValueError):
            raise ConfigError("logit_bias must map token ids to numbers") from None
        params = SamplingParams(**values, logit_bias=bias, top_logprobs=top_logprobs)
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        request = Request(
            prompt=ids,
            sampling=params,
            max_tokens=limit,
            stop_ids=frozenset() if ignore_eos else frozenset(config.stop_token_ids),
            stop_strings=stops if ignore_eos else (*stops, *config.stop_strings),
        )
        self._core.check_prompt(ids)
        return [replace(request, choice=choice) for choice in range(n)]

    def collect(self, requests: list[Request], logprobs: int | None) -> tuple[list[_Answer], Usage]:
        """Run requests to their ends."""
        answers = []
        usages = []
        for request in requests:
            answer, tokens, texts = _Answer(), [], []
            for piece in self._core.generate(request, self._tokenizer.stream()):
                texts.append(piece.text)
                tokens.append(piece.token)
                answer.finish_reason = piece.finish_reason
            answer.text, answer.logprobs = "".join(texts), self.logprobs_of(tokens, logprobs)
            answers.append(answer)
            usages.append(self._usage())
        return answers, _total(usages)

    def stream(
        self, requests: list[Request], part: Callable[[int, Piece, bool], _Chunk], last: _Chunk | None
    ) -> Iterator[_Chunk]:
        """Parts of all choices, one choice after the other; then ``last`` with the usage, if it is given."""
        usages = []
        for request in requests:
            first = True
            for piece in self._core.generate(request, self._tokenizer.stream()):
                yield part(request.choice, piece, first)
                first = False
            usages.append(self._usage())
        if last is not None:
            yield last.model_copy(update={"choices": [], "usage": _total(usages)})

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the answer begins."""
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
                raise ConfigError("every message needs a role and a content")
        return self._tokenizer.encode(self._tokenizer.apply_chat_template([dict(m) for m in messages]))

    def logprobs_of(self, tokens: Sequence[SampledToken | None], asked: int | None) -> ChoiceLogprobs | None:
        """Log probabilities in OpenAI's shape; None if they were not asked for."""
        if asked is None:
            return None
        content = []
        for token in tokens:
            if token is not None and token.logprob is not None:
                top = [TopLogprob(**self._named(index, value)) for index, value in token.top]
                content.append(TokenLogprob(**self._named(token.id, token.logprob), top_logprobs=top))
        return ChoiceLogprobs(content=content)

    def _named(self, index: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([index], skip_special_tokens=False)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _usage(self) -> Usage:
        stats = self._core.stats
        return Usage(
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.completion_tokens,
            total_tokens=stats.prompt_tokens + stats.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=stats.cached_tokens),
        )


class ChatCompletions:
    """``chat.completions.create(...)``: the next message of a conversation."""

    def __init__(self, completions: Completions) -> None:
        self._text = completions

    @overload
    def create(
        self, *, messages: Sequence[Mapping[str, Any]], stream: Literal[False] = ..., **options: Any
    ) -> ChatCompletion: ...

    @overload
    def create(
        self, *, messages: Sequence[Mapping[str, Any]], stream: Literal[True], **options: Any
    ) -> Iterator[ChatCompletionChunk]: ...

    def create(
        self,
        *,
        messages: Sequence[Mapping[str, Any]],
        stream: bool = False,
        stream_options: Mapping[str, Any] | None = None,
        logprobs: bool = False,
        top_logprobs: int | None = None,
        **options: Any,
    ) -> ChatCompletion | Iterator[ChatCompletionChunk]:
        """Answer a conversation.

        Parameters
        ----------
        messages : sequence of mappings
            Each with ``role`` and ``content``.
        stream, stream_options
            As of :meth:`Completions.create`.
        logprobs, top_logprobs
            Report the log probability of each token, and of so many likeliest ones.
        **options
            As of :meth:`Completions.create`.

        Raises
        ------
        KvqError
            If an option is unknown or impossible, or the conversation does not fit.
        """
        if top_logprobs is not None and not logprobs:
            raise ConfigError("top_logprobs needs logprobs=True")
        asked = (top_logprobs or 0) if logprobs else None
        text = self._text
        requests = text.requests(text.encode_chat(messages), top_logprobs=asked, **options)
        identity = new_id("chatcmpl")
        if stream:
            empty = ChatCompletionChunk(id=identity, model=text.model_name, choices=[])

            def part(choice: int, piece: Piece, first: bool) -> ChatCompletionChunk:
                shown = ChatChunkChoice(
                    index=choice,
                    delta=Delta(role="assistant" if first else None, content=piece.text),
                    logprobs=text.logprobs_of([piece.token], asked),
                    finish_reason=piece.finish_reason,
                )
                return empty.model_copy(update={"choices": [shown]})

            return text.stream(requests, part, empty if _wants_usage(stream_options) else None)
        answers, usage = text.collect(requests, asked)
        choices = [
            ChatChoice(
                index=i,
                message=Message(role="assistant", content=a.text),
                logprobs=a.logprobs,
                finish_reason=a.finish_reason,
            )
            for i, a in enumerate(answers)
        ]
        return ChatCompletion(id=identity, model=text.model_name, choices=choices, usage=usage)


class Chat:
    """Carries ``completions``, as OpenAI's client does."""

    def __init__(self, completions: Completions) -> None:
        self.completions = ChatCompletions(completions)


def _wants_usage(stream_options: Mapping[str, Any] | None) -> bool:
    return bool(stream_options and stream_options.get("include_usage"))


def _total(usages: list[Usage]) -> Usage:
    """Usage of several choices of one prompt, which counts once."""
    prompt, completion = usages[0].prompt_tokens, sum(usage.completion_tokens for usage in usages)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=usages[0].prompt_tokens_details,
    )
