"""The official client, unchanged, against a running server: sync and async, streams and not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from serving import Served, serve_fake

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "roll", "description": "Roll a die.", "parameters": SCHEMA, "strict": True},
    },
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve_fake(context=600) as served:
        yield served
        served.check_idle()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(served: Served, count: int) -> str:
    return "".join(map(chr, served.model.greedy(list(b"u:hi\xffa:"), count)))


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "kvq"


def test_chat(client: openai.OpenAI, served: Served) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_completion_tokens=9)
    assert answer.choices[0].message.content == expected(served, 9)
    assert answer.choices[0].finish_reason == "length" and answer.choices[0].message.role == "assistant"
    assert answer.usage is not None and answer.usage.completion_tokens == 9
    again: list[Any] = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": "more"}]
    assert (
        client.chat.completions.create(model="fake", messages=again, max_tokens=2).choices[0].message.content
    )


def test_a_chat_stream(client: openai.OpenAI, served: Served) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=9, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == expected(served, 9)
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 9


def test_the_streaming_helper(client: openai.OpenAI, served: Served) -> None:
    with client.chat.completions.stream(model="fake", messages=MESSAGES, max_tokens=4) as stream:
        content = [event.content for event in stream if event.type == "content.done"]
        assert content == [expected(served, 4)]


def test_leaving_a_stream_cancels_it(client: openai.OpenAI, served: Served) -> None:
    before = served.core.stats().cancelled
    served.model.fail = lambda _: __import__("time").sleep(0.01)
    try:
        with client.chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=500, stream=True
        ) as stream:
            next(iter(stream))
        served.wait_until(lambda: served.core.stats().cancelled == before + 1)
    finally:
        served.model.fail = None


def test_text(client: openai.OpenAI, served: Served) -> None:
    prompt = "hello"
    whole = client.completions.create(model="fake", prompt=prompt, max_tokens=5, logprobs=2, n=2, seed=1)
    assert [choice.index for choice in whole.choices] == [0, 1]
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.top_logprobs is not None
    assert "".join(logprobs.tokens) == whole.choices[0].text and logprobs.text_offset == [0, 1, 2, 3, 4]
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    parts = list(client.completions.create(model="fake", prompt=prompt, max_tokens=5, stream=True))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
        assert entry.top_logprobs[0].token == entry.token and entry.bytes == [ord(entry.token)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_is_followed(client: openai.OpenAI, stream: bool) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "roll", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        options: dict[str, Any] = {"response_format": form, "temperature": 2, "seed": seed, "max_tokens": 200}
        if stream:
            chunks = client.chat.completions.create(model="fake", messages=MESSAGES, stream=True, **options)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            answer = client.chat.completions.create(model="fake", messages=MESSAGES, **options)
            assert answer.choices[0].finish_reason == "stop"
            text = answer.choices[0].message.content or ""
        value = json.loads(text)
        assert set(value) == {"n", "ok"} and 0 <= value["n"] <= 9 and isinstance(value["ok"], bool)


@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_tool_is_called(client: openai.OpenAI, stream: bool) -> None:
    choice: Any = {"type": "function", "function": {"name": "roll"}}
    options: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": choice,
        "temperature": 1,
        "seed": 3,
        "max_tokens": 300,
    }
    if stream:
        chunks = list(client.chat.completions.create(model="fake", messages=MESSAGES, stream=True, **options))
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert not any(chunk.choices[0].delta.content for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason == "tool_calls" and calls[0].index == 0
        function: Any = calls[0].function
    else:
        answer = client.chat.completions.create(model="fake", messages=MESSAGES, **options).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.tool_calls is not None
        assert answer.message.content is None and len(answer.message.tool_calls) == 1
        call: Any = answer.message.tool_calls[0]
        function = call.function
        again: list[Any] = [
            *MESSAGES,
            answer.message,
            {"role": "tool", "tool_call_id": call.id, "content": "6"},
        ]
        after = client.chat.completions.create(model="fake", messages=again, tools=TOOLS, max_tokens=3)
        assert after.choices[0].finish_reason == "length"
    assert function.name == "roll" and set(json.loads(function.arguments)) == {"n", "ok"}


def test_a_call_that_the_model_makes_by_itself(client: openai.OpenAI, served: Served) -> None:
    text = 'Hm.<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    start = len(b"u:hi\xffa:")
    served.model.script = {start + i: ord(char) for i, char in enumerate(text)} | {start + len(text): 255}
    try:
        answer = client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS, max_tokens=200)
        plain = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=200)
    finally:
        served.model.script = {}
    message = answer.choices[0].message
    assert message.content == "Hm." and message.tool_calls is not None
    call: Any = message.tool_calls[0]
    assert (call.function.name, call.function.arguments) == ("stop", "{}")
    assert plain.choices[0].message.content == text and plain.choices[0].finish_reason == "stop"


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens: Input should be greater"):
        client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=0)
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    with pytest.raises(openai.APIStatusError) as caught:
        client.embeddings.create(model="fake", input="x")
    assert caught.value.status_code == 501


def test_many_async_requests_run_at_once(served: Served) -> None:
    async def ask(client: openai.AsyncOpenAI, index: int) -> tuple[str, str]:
        messages: list[Any] = [{"role": "user", "content": f"question {index % 5}"}]
        whole = client.chat.completions.create(model="fake", messages=messages, max_tokens=12)
        stream = await client.chat.completions.create(
            model="fake", messages=messages, max_tokens=12, stream=True
        )
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        return (await whole).choices[0].message.content or "", streamed

    async def main() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, index) for index in range(15)))

    for index, (whole, streamed) in enumerate(asyncio.run(main())):
        prompt = list(f"u:question {index % 5}\xffa:".encode("latin-1"))
        assert whole == streamed == "".join(map(chr, served.model.greedy(prompt, 12)))
    assert max(served.model.batches) > 1
