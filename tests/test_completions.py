"""OpenAI's options from Python: what becomes a request, what is refused, how tools and formats come back."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fake_model import FakeModel, fake_config, fake_core
from kvq.engine.completions import Chat, Completions
from kvq.engine.driver import Driver
from kvq.engine.options import ChatOptions, TextOptions, parse_options
from kvq.engine.request import Request
from kvq.errors import ConfigError
from kvq.tokenizer import Tokenizer
from tiny_llama import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}={{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.x }}]{% endfor %}"
    ";{% endfor %}"
    "{% if tools %}<tool_call>{{ tools | map(attribute='function.name') | join(',') }}{% endif %}"
)
USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def make(template: str | None = TEMPLATE, **config: Any) -> tuple[FakeModel, Completions]:
    """Completions over the fake model, with a real tokenizer and template before it."""
    model = FakeModel(context=300, num_open=4)
    core = fake_core(model)
    tokenizer = Tokenizer(byte_tokenizer(), template)
    return model, Completions(Driver(core), tokenizer, fake_config(chat_template=template, **config), "fake")


def prompt_of(completions: Completions, **options: Any) -> str:
    ids = completions.ask.encode_chat(parse_options(ChatOptions, options))
    return Tokenizer(byte_tokenizer()).decode(ids)


def read(completions: Completions, request: Request) -> str:
    """An answer in the tokenizer's own bytes; the fake model's text is Latin-1."""
    pieces = [piece for _, piece in completions._driver.run([request])]
    return Tokenizer(byte_tokenizer()).decode(piece.token.id for piece in pieces if piece.token is not None)


def test_logprobs_of_text_go_side_by_side() -> None:
    _, completions = make()
    choice = completions.create(prompt="hello", max_tokens=3, logprobs=2).choices[0]
    assert choice.logprobs is not None and len(choice.logprobs.tokens) == 3
    for token, own, top in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 2 and top[token] == own == max(top.values())
    assert completions.create(prompt="hello", max_tokens=3).choices[0].logprobs is None
    with pytest.raises(ConfigError, match="needs logprobs=True"):
        Chat(completions).completions.create(messages=[USER], top_logprobs=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: Input should be greater"),
        ({"n": 0}, "n: Input should be greater"),
        ({"temprature": 1}, "unknown option 'temprature'"),
        ({"temperature": -1}, "temperature: "),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {300: 1}}, "300"),
        ({"stream_options": {"usage": True}}, "unknown option 'stream_options.usage'"),
        ({"prompt": 5}, "prompt"),
    ],
)
def test_impossible_options_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    _, completions = make()
    with pytest.raises(ConfigError, match=message) as caught:
        completions.create(**{"prompt": "abc", **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("messages", [[{"role": "user"}], ["hi"], [{"content": "x"}], []])
def test_malformed_messages_are_refused(messages: list[Any]) -> None:
    _, completions = make()
    with pytest.raises(ConfigError, match="message"):
        Chat(completions).completions.create(messages=messages)


def test_defaults_are_the_models_own() -> None:
    _, completions = make(temperature=0.7, top_p=0.9, stop_strings=["END"])
    parsed = parse_options(ChatOptions, {"messages": [USER], "top_k": 5, "stop": "x"})
    request = completions.ask.chat(parsed).requests[0]
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.7, 0.9, 5)
    assert request.stop_strings == ("x", "END") and request.stop_ids == {255} and request.max_tokens is None
    parsed = parse_options(ChatOptions, {"messages": [USER], "ignore_eos": True, "temperature": 0})
    request = completions.ask.chat(parsed).requests[0]
    assert request.stop_strings == () and not request.stop_ids and request.sampling.temperature == 0


def test_max_completion_tokens_is_the_newer_name() -> None:
    _, completions = make()
    chat = Chat(completions).completions
    answer = chat.create(messages=[USER], max_completion_tokens=4, max_tokens=9)
    assert answer.usage.completion_tokens == 4


def test_messages_reach_the_template_as_it_expects_them() -> None:
    _, completions = make()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 3}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    assert prompt_of(completions, messages=messages) == "user=ab;assistant=[f 3];tool=4;"
    assert prompt_of(completions, messages=[USER], tools=TOOLS) == "user=hi;<tool_call>f"
    assert prompt_of(completions, messages=[USER], tools=TOOLS, tool_choice="none") == "user=hi;"


def test_tools_need_a_template_that_has_them() -> None:
    _, completions = make(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    chat = Chat(completions).completions
    with pytest.raises(ConfigError, match="defines no tools"):
        chat.create(messages=[USER], tools=TOOLS)
    assert chat.create(messages=[USER], tools=TOOLS, tool_choice="none", max_tokens=2).choices


def test_a_demanded_call_excludes_another_format() -> None:
    _, completions = make()
    with pytest.raises(ConfigError, match="response_format"):
        Chat(completions).completions.create(
            messages=[USER], tools=TOOLS, tool_choice="required", response_format={"type": "json_object"}
        )


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ({"type": "regex", "regex": "[ab]{5}"}, "[ab]{5}"),
        ({"type": "grammar", "grammar": 'start: "x" /[0-9]{3}/'}, "x[0-9]{3}"),
        ({"type": "grammar", "grammar": 'root ::= "y" | "z"'}, "y|z"),
    ],
)
def test_formats_of_kvqs_own(form: dict[str, str], wanted: str) -> None:
    _, completions = make()
    parsed = parse_options(TextOptions, {"prompt": "p", "response_format": form, "max_tokens": 20})
    request = completions.ask.text(parsed).requests[0]
    assert re.fullmatch(wanted, read(completions, request))


def test_json_objects_may_bring_a_schema_as_text() -> None:
    _, completions = make()
    schema = json.dumps({"enum": [[1, 2]]})
    form = {"type": "json_object", "schema": schema}
    parsed = parse_options(TextOptions, {"prompt": "p", "response_format": form, "max_tokens": 99})
    request = completions.ask.text(parsed).requests[0]
    assert json.loads(read(completions, request)) == [1, 2]


@pytest.mark.parametrize("options", [{}, {"logprobs": 1}, {"tools": TOOLS}, {"n": 2, "stop": ["e"]}])
@pytest.mark.parametrize("chat", [False, True])
def test_the_json_of_a_part_is_that_of_the_part(chat: bool, options: dict[str, Any]) -> None:
    model, completions = make()
    model.script = {8: 0x85, 9: ord('"'), 10: 0x0A, 11: ord("\\")}
    given = {"seed": 1, "temperature": 1, "max_tokens": 6, "stream": True, **options}
    if chat:
        if options.get("logprobs"):
            given["top_logprobs"] = 1
        parsed: Any = parse_options(ChatOptions, {"messages": [USER], **given})
        answers = [completions.ask.chat(parsed) for _ in range(2)]
    else:
        given.pop("tools", None)
        parsed = parse_options(TextOptions, {"prompt": "hello", **given})
        answers = [completions.ask.text(parsed) for _ in range(2)]
    answers[1].id = answers[0].id
    for index, piece in completions._driver.run(answers[0].requests):
        part, text = answers[0].feed(index, piece), answers[1].feed_json(index, piece)
        assert (part is None) == (text is None)
        if part is not None and text is not None:
            expected = part.model_dump(mode="json")
            assert json.loads(text) | {"created": expected["created"]} == expected
    whole = [answer.whole().model_dump() | {"created": 0} for answer in answers]
    assert whole[0] == whole[1]
