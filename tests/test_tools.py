"""Tool calls of each family: found in text that is cut anywhere, and demanded by a grammar."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.engine.structured import Grammars, lark_grammar
from kvq.engine.tools import HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, Found, ToolFormat, format_of
from kvq.errors import ConfigError
from kvq.tokenizer import Tokenizer
from tiny_llama import byte_tokenizer

FORMATS = [HERMES, MISTRAL, MISTRAL_NAMED, LLAMA3]

WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"enum": ["Paris", "Rom"]}},
    },
}
CLOCK = {"name": "clock", "parameters": None}

#: Answers as models of the families write them, the text before the call, and the calls.
ANSWERS: list[tuple[ToolFormat, str, str, list[tuple[str, Any]]]] = [
    (
        HERMES,
        'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "Let me see.",
        [("get_weather", {"city": "Paris"})],
    ),
    (
        HERMES,
        '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "b", "arguments": {"x": 1}}</tool_call>',
        "",
        [("a", {}), ("b", {"x": 1})],
    ),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "a", "arguments": {"x": "]"}}, {"name": "b", "arguments": {}}]',
        "",
        [("a", {"x": "]"}), ("b", {})],
    ),
    (
        MISTRAL_NAMED,
        'Wait.[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[ARGS]{}',
        "Wait.",
        [("a", {"x": 1}), ("b", {})],
    ),
    (LLAMA3, '{"name": "a", "parameters": {"x": 1}}', "", [("a", {"x": 1})]),
    (LLAMA3, '\n<|python_tag|>{"name": "a", "parameters": {"x": 1}}', "", [("a", {"x": 1})]),
    (
        LLAMA3,
        '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}',
        "",
        [("a", {}), ("b", {})],
    ),
]


def parse(form: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, Any]], list[Found]]:
    parser = form.parser()
    found = [*(parser.put(piece) for piece in pieces), parser.flush()]
    calls = [(call.name, json.loads(call.arguments)) for one in found for call in one.calls]
    return "".join(one.text for one in found), calls, found


def cut(data: st.DataObject, text: str) -> list[str]:
    pieces = []
    while text:
        size = data.draw(st.integers(1, len(text)))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize(
    ("form", "answer", "text", "calls"), ANSWERS, ids=lambda value: getattr(value, "name", None)
)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_calls_are_found_wherever_the_text_is_cut(
    form: ToolFormat, answer: str, text: str, calls: list[tuple[str, Any]], data: st.DataObject
) -> None:
    shown, found, parts = parse(form, cut(data, answer))
    assert (shown, found) == (text, calls)
    ids = [call.id for part in parts for call in part.calls]
    assert len(set(ids)) == len(ids) and all(len(i) == 9 and i.isalnum() for i in ids)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_text_without_a_call_comes_out_whole(form: ToolFormat, data: st.DataObject) -> None:
    text = data.draw(
        st.sampled_from(
            [
                "no call here",
                "  {not json",
                '{"a": 1}',
                "a < b <tool",
                "[TOOL_CALL",
                "<tool_call>{broken</tool_call> after",
                "[TOOL_CALLS]nothing",
                "<|python_tag|>x = 1",
                "trailing space \n",
                "",
            ]
        )
        if data.draw(st.booleans())
        else st.text("<tool_cal>/[TOLCAS] {}", max_size=30)
    )
    shown, calls, _ = parse(form, cut(data, text))
    assert calls == []
    assert shown.split() == text.split() or shown == text
    assert len(shown) >= len(text.rstrip())


def test_text_is_not_held_back_without_need() -> None:
    parser = HERMES.parser()
    assert parser.put("Hello ").text == "Hello"
    assert parser.put("there <").text == " there"
    assert parser.put("b").text == " <b"


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("parallel", [False, True])
def test_a_demanded_call_is_one_that_the_parser_finds(form: ToolFormat, parallel: bool) -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    grammars = Grammars(tokenizer, 259, [2])
    grammar = lark_grammar(form.grammar([WEATHER, CLOCK], parallel, {}))
    names = set()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        constraint = grammars.constraint(grammar)
        tokens: list[int] = []
        while not constraint.stopped:
            mask = constraint.allowed()
            token = 2 if mask[2] and rng.random() < 0.7 else int(rng.choice(np.flatnonzero(mask)))
            constraint.advance(token)
            if token == 2:
                break
            tokens.append(token)
            assert len(tokens) < 2000
        text, calls, _ = parse(form, [tokenizer.decode(tokens)])
        assert text == "" and calls and (parallel or len(calls) == 1)
        for name, arguments in calls:
            names.add(name)
            assert arguments == {} or name == "clock" or arguments["city"] in ("Paris", "Rom")
    assert names == {"get_weather", "clock"}


def test_markers_that_are_tokens_are_demanded_as_tokens() -> None:
    text = HERMES.grammar([CLOCK], False, {"<tool_call>": 7, "</tool_call>": 8})
    assert "<[7]>" in text and "<[8]>" in text and "tool_call" not in text
    tokenizer = Tokenizer(byte_tokenizer())
    constraint = Grammars(tokenizer, 259, [2]).constraint(
        lark_grammar(MISTRAL.grammar([CLOCK], True, {"[TOOL_CALLS]": 1}))
    )
    assert np.flatnonzero(constraint.allowed()).tolist() == [1]


def test_a_bad_parameter_schema_is_refused() -> None:
    grammars = Grammars(Tokenizer(byte_tokenizer()), 259, [2])
    for form in FORMATS:
        with pytest.raises(ConfigError, match="not valid"):
            grammars.constraint(
                lark_grammar(form.grammar([{"name": "a", "parameters": {"type": "x"}}], False, {}))
            )


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ("{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS]{% endif %}", MISTRAL),
        ("{% if tools %}[TOOL_CALLS]{{ n }}[ARGS]{% endif %}", MISTRAL_NAMED),
        ("{% if tools %}{{ '\"parameters\": ' }}ipython{% endif %}", LLAMA3),
        ('{% if tools %}{{ "\\"parameters\\": " }}ipython{% endif %}', LLAMA3),
        ("{% if tools %}<tool_call>{{ name }}<arg_key>{% endif %}", None),
        ("{% if tools %}<tool_call><function={{ name }}>{% endif %}", None),
        ("{{ messages }}", None),
        ("{% if tools %}something else{% endif %}", None),
        (None, None),
    ],
)
def test_the_template_tells_the_family(template: str | None, form: ToolFormat | None) -> None:
    assert format_of(template) is form
