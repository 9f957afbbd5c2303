"""From validated options to requests for the engine: prompts, sampling, where to stop, what to follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvq.config import ChatConfig
from kvq.engine import structured
from kvq.engine.answers import ChatAnswer, TextAnswer
from kvq.engine.options import MAX_CHOICES, ChatOptions, CommonOptions, NamedTool, TextOptions
from kvq.engine.request import Request
from kvq.engine.structured import Grammars
from kvq.engine.tools import ToolFormat, format_of
from kvq.errors import ConfigError
from kvq.runtime.sampler import SamplingParams
from kvq.tokenizer import Tokenizer

#: Sampling options whose default is the model's.
_MODEL_DEFAULTS = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_OWN_DEFAULTS = ("top_k", "min_p", "seed")


class Asker:
    """Makes requests for one model.

    Parameters
    ----------
    tokenizer : Tokenizer
    config : ChatConfig
        Default options, stop tokens, and the chat template that tells how tools are called.
    model_name : str
        Named in responses.
    check : callable
        Raises ConfigError if the engine can never run a request.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: ChatConfig,
        model_name: str,
        check: Callable[[Request], None],
    ) -> None:
        self._tokenizer, self._config, self.model_name, self._check = tokenizer, config, model_name, check
        self._grammars = Grammars(tokenizer, config.active_vocab_size, config.stop_token_ids)
        self._tools = format_of(config.chat_template)

    def text(self, options: TextOptions) -> TextAnswer:
        """Requests for ``completions.create``, in the answer that takes their pieces.

        Raises
        ------
        ConfigError
            If an option is impossible, or a prompt does not fit.
        """
        requests = self._requests(
            self._prompts(options.prompt),
            options,
            options.max_tokens,
            options.logprobs,
            self._format(options),
        )
        return TextAnswer(requests, options.n or 1, self._tokenizer, self.model_name, options.logprobs)

    def chat(self, options: ChatOptions) -> ChatAnswer:
        """Requests for ``chat.completions.create``, in the answer that takes their pieces.

        Raises
        ------
        ConfigError
            As :meth:`text`; if the chat template refuses the messages or defines no tools.
        """
        if options.top_logprobs is not None and not options.logprobs:
            raise ConfigError("top_logprobs needs logprobs=True")
        asked = (options.top_logprobs or 0) if options.logprobs else None
        limit = options.max_tokens if options.max_completion_tokens is None else options.max_completion_tokens
        tools, grammar = self._chosen_tools(options)
        if grammar is None:
            grammar = self._format(options)
        elif self._format(options) is not None:
            raise ConfigError("response_format cannot be followed by an answer that tool_choice makes a call")
        ids = self.encode_chat(options)
        requests = self._requests([ids], options, limit, asked, grammar)
        return ChatAnswer(requests, options.n or 1, self._tokenizer, self.model_name, asked, tools)

    def encode_chat(self, options: ChatOptions) -> list[int]:
        """Token ids of a conversation, up to where the answer begins."""
        variables: dict[str, Any] = {}
        if options.tools and options.tool_choice != "none":
            variables["tools"] = [tool.model_dump(exclude_none=True) for tool in options.tools]
        messages = [message.for_template() for message in options.messages]
        return self._tokenizer.encode(self._tokenizer.apply_chat_template(messages, **variables))

    def _prompts(self, prompt: str | list[str] | list[int] | list[list[int]]) -> list[list[int]]:
        if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
            return [self._prompt(prompt)]
        return [self._prompt(one) for one in prompt]

    def _prompt(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt, add_special_tokens=True)
        return list(prompt)

    def _requests(
        self,
        prompts: list[list[int]],
        options: CommonOptions,
        limit: int | None,
        top_logprobs: int | None,
        grammar: str | None,
    ) -> list[Request]:
        config, n = self._config, options.n or 1
        if len(prompts) * n > MAX_CHOICES:
            raise ConfigError(
                f"{len(prompts)} prompts with n {n} are too many: at most {MAX_CHOICES} answers"
            )
        values = {name: getattr(config, name) for name in _MODEL_DEFAULTS}
        asked = {name: getattr(options, name) for name in (*_MODEL_DEFAULTS, *_OWN_DEFAULTS)}
        values |= {name: value for name, value in asked.items() if value is not None}
        sampling = SamplingParams(**values, logit_bias=options.logit_bias or {}, top_logprobs=top_logprobs)
        stops = [options.stop] if isinstance(options.stop, str) else options.stop or []
        stop_strings = tuple(stop for stop in stops if stop)
        requests = [
            Request(
                prompt=ids,
                sampling=sampling,
                max_tokens=limit,
                stop_ids=frozenset() if options.ignore_eos else frozenset(config.stop_token_ids),
                stop_strings=stop_strings if options.ignore_eos else (*stop_strings, *config.stop_strings),
                choice=choice,
                constraint=None if grammar is None else self._grammars.constraint(grammar),
            )
            for ids in prompts
            for choice in range(n)
        ]
        for request in requests[::n]:
            self._check(request)
        return requests

    def _format(self, options: CommonOptions) -> str | None:
        """The grammar that ``response_format`` asks for."""
        asked = options.response_format
        if asked is None or asked.type == "text":
            return None
        if asked.type == "regex":
            return structured.regex_grammar(_given("regex", asked.regex))
        if asked.type == "grammar":
            return structured.text_grammar(_given("grammar", asked.grammar))
        if asked.type == "json_object":
            schema = {"type": "object"} if asked.schema_ is None else structured.read_schema(asked.schema_)
            return structured.json_schema_grammar(schema)
        given = asked.json_schema.schema_ if asked.json_schema else None
        return structured.json_schema_grammar(_given("json_schema.schema", given))

    def _chosen_tools(self, options: ChatOptions) -> tuple[ToolFormat | None, str | None]:
        """How calls are written if any may be made, and the grammar if one must be."""
        choice = options.tool_choice
        if not options.tools:
            if isinstance(choice, NamedTool) or choice == "required":
                raise ConfigError("tool_choice demands a call and there are no tools: give tools as well")
            return None, None
        if choice == "none":
            return None, None
        if self._tools is None:
            raise ConfigError(
                "this model's chat template defines no tools in the way of Hermes, Llama 3.1 or Mistral: "
                "leave tools out, or serve a model that has them"
            )
        if choice in (None, "auto"):
            return self._tools, None
        functions = [tool.function for tool in options.tools]
        if isinstance(choice, NamedTool):
            functions = [function for function in functions if function.name == choice.function.name]
            if not functions:
                raise ConfigError(f"tool_choice names {choice.function.name!r}, which is not among the tools")
        markers = {marker: self._tokenizer.token_id(marker) for marker in self._tools.markers}
        special = {
            marker: index
            for marker, index in markers.items()
            if index is not None and self._tokenizer.is_special(index)
        }
        parallel = choice == "required" and options.parallel_tool_calls is not False
        grammar = self._tools.grammar([f.model_dump() for f in functions], parallel, special)
        return self._tools, structured.lark_grammar(grammar)


def _given(name: str, value: Any) -> Any:
    if value is None:
        raise ConfigError(f"response_format lacks {name}")
    return value
