"""The engine over a fake model that sees exactly what the cache shows it."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_model import END_OF_TURN, VOCAB, FakeModel, fake_core, fake_parts
from kvq.engine import Engine
from kvq.engine.completions import Chat, Completions
from kvq.engine.core import EngineCore
from kvq.engine.options import ChatOptions, parse_options
from kvq.engine.request import Request
from kvq.engine.stop import StopMatcher
from kvq.errors import ConfigError, EngineError
from kvq.runtime.metadata import DRAW, LIKELIEST
from kvq.runtime.sampler import SamplingParams

CONTEXT = 300


def make(chunk: int = 64, **config: Any) -> tuple[FakeModel, EngineCore, Completions]:
    model = FakeModel(CONTEXT, num_open=4)
    core = fake_core(model, CONTEXT, chunk)
    return model, core, Engine.of(fake_parts(core, **config)).completions


def text_of(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


@pytest.mark.parametrize("chunk", [1, 7, 32, 64])
def test_chunks_do_not_change_the_answer(chunk: int) -> None:
    model, _, completions = make(chunk)
    prompt = [i % 90 + 33 for i in range(100)]
    answer = completions.create(prompt=prompt, max_tokens=50)
    assert answer.choices[0].text == text_of(model.greedy(prompt, 50))
    assert answer.choices[0].finish_reason == "length"
    assert max(model.steps) == max(chunk, 4) and sum(model.steps) == 149
    assert answer.usage is not None and answer.usage.model_dump() == {
        "prompt_tokens": 100,
        "completion_tokens": 50,
        "total_tokens": 150,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_conversation_reuses_its_prefix() -> None:
    model, core, completions = make()
    chat = Chat(completions).completions
    messages = [{"role": "user", "content": "x" * 70}]
    for turn in range(3):
        before = sum(model.steps)
        answer = chat.create(messages=messages, max_tokens=20)
        ids = completions.ask.encode_chat(parse_options(ChatOptions, {"messages": messages}))
        assert answer.choices[0].message.content == text_of(model.greedy(ids, 20))
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert (cached > 0) == (turn > 0)
        assert sum(model.steps) - before == len(ids) - cached + 19
        assert len(ids) - cached < 64 or turn == 0
    core.check_integrity()
    assert model.cache.num_free_pages < model.cache.pool.num_pages == model.cache.pool.num_available
    core.reset()
    assert model.cache.num_free_pages == model.cache.pool.num_pages


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 150), st.integers(1, 40)), min_size=2, max_size=6)
)
def test_any_order_of_prompts_gives_the_answers_of_a_cold_cache(asked: list[tuple[int, int, int]]) -> None:
    """Prompts that share prefixes of any length, cut anywhere, even inside sealed pages."""
    model, core, completions = make()
    texts = [[33 + i % 90 for i in range(150)], [33 + i % 90 if i < 80 else 40 for i in range(150)]]
    for which, length, tokens in asked:
        prompt = texts[which][:length]
        answer = completions.create(prompt=prompt, max_tokens=tokens)
        assert answer.choices[0].text == text_of(model.greedy(prompt, tokens))
        core.check_integrity()


def test_a_full_context_ends_with_length() -> None:
    model, _, completions = make()
    prompt = [50] * (CONTEXT - 10)
    answer = completions.create(prompt=prompt)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.total_tokens == CONTEXT
    assert sum(model.steps) == CONTEXT - 1
    again = completions.create(prompt=prompt)
    assert again.choices[0].text == answer.choices[0].text


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([5] * CONTEXT, "300 tokens and the context window 300"), ([VOCAB], "outside 0 .. 255")],
)
def test_prompts_that_do_not_fit_are_refused(prompt: list[int], message: str) -> None:
    _, _, completions = make()
    for stream in (False, True):
        with pytest.raises(ConfigError, match=message):
            completions.create(prompt=prompt, stream=stream)  # type: ignore[call-overload]


def test_a_stop_id_ends_the_answer_and_is_no_part_of_it() -> None:
    model, _, completions = make()
    prompt = list(b"hello")
    model.script[8] = END_OF_TURN
    answer = completions.create(prompt=prompt, max_tokens=50)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == text_of(model.greedy(prompt, 3))
    assert answer.usage is not None and answer.usage.completion_tokens == 4
    longer = completions.create(prompt=prompt, max_tokens=10, ignore_eos=True)
    assert longer.choices[0].finish_reason == "length"


def test_stop_strings_across_tokens() -> None:
    model, _, completions = make()
    full = text_of(model.greedy(list(b"hello"), 30))
    stop = full[10:13]
    parts = list(completions.create(prompt=list(b"hello"), stop=["zzzz", stop], stream=True))
    text = "".join(part.choices[0].text for part in parts)
    assert text == full[: full.find(stop)]
    assert parts[-1].choices[0].finish_reason == "stop"
    assert all(part.choices[0].finish_reason is None for part in parts[:-1])


def test_what_was_held_back_comes_out_at_the_end() -> None:
    model, _, completions = make()
    full = text_of(model.greedy(list(b"hello"), 12))
    answer = completions.create(prompt=list(b"hello"), max_tokens=12, stop=full[-1] + "\x01")
    assert answer.choices[0].text == full and answer.choices[0].finish_reason == "length"


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_matcher_gives_what_stands_before_the_first_match(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    matcher, shown = StopMatcher(stops), ""
    rest = text
    while rest and not matcher.stopped:
        size = data.draw(st.integers(1, len(rest)))
        shown += matcher.put(rest[:size])
        rest = rest[size:]
        seen = text[: len(text) - len(rest)]
        assert not any(stop in shown for stop in stops)
        found = [seen.find(stop) for stop in stops if stop in seen]
        assert matcher.stopped == bool(found)
        assert seen.startswith(shown)
    shown += matcher.flush()
    if not matcher.stopped:
        assert shown == text


def test_stream_has_openais_shape() -> None:
    _, _, completions = make()
    chat = Chat(completions).completions
    messages = [{"role": "user", "content": "hi"}]
    whole = chat.create(messages=messages, max_tokens=5)
    chunks = list(
        chat.create(messages=messages, max_tokens=5, stream=True, stream_options={"include_usage": True})
    )
    assert whole.object == "chat.completion" and whole.choices[0].message.role == "assistant"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].id.startswith("chatcmpl-")
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[1].choices[0].delta.role is None
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * 4 + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_several_choices_and_seeds() -> None:
    _, _, completions = make(temperature=1.0)
    first = completions.create(prompt="hello", n=3, seed=7, max_tokens=12)
    again = completions.create(prompt="hello", n=3, seed=7, max_tokens=12)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices] and len(set(texts)) == 3
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert first.usage is not None and first.usage.completion_tokens == 36 and first.usage.prompt_tokens == 5
    streamed = completions.create(prompt="hello", n=3, seed=7, max_tokens=12, stream=True)
    joined = ["", "", ""]
    for part in streamed:
        joined[part.choices[0].index] += part.choices[0].text
    assert joined == texts


def test_an_abandoned_stream_leaves_the_cache_in_order() -> None:
    model, core, completions = make()
    stream = completions.create(prompt=list(b"hello"), max_tokens=50, stream=True)
    next(stream)
    other = completions.create(prompt=list(b"other"), max_tokens=3)  # while the stream is not read
    assert other.choices[0].text == text_of(model.greedy(list(b"other"), 3))
    next(stream)
    assert core.stats().running == 1
    stream.close()  # type: ignore[attr-defined]
    core.check_integrity()
    assert core.stats().running == 0 and core.stats().cancelled == 1
    answer = completions.create(prompt=list(b"hello"), max_tokens=20)
    assert answer.choices[0].text == text_of(model.greedy(list(b"hello"), 20))


def test_a_step_that_breaks_ends_the_request() -> None:
    model, _, completions = make()

    def fail(_: Any) -> None:
        if len(model.steps) == 5:
            raise RuntimeError("broken step")

    model.fail = fail
    with pytest.raises(EngineError, match="broken step"):
        completions.create(prompt=list(b"hello"), max_tokens=20)
    assert model.cache.sequence_ids == []
    model.fail = None
    answer = completions.create(prompt=list(b"hello"), max_tokens=20)
    assert answer.choices[0].text == text_of(model.greedy(list(b"hello"), 20))


def test_requests_of_several_threads() -> None:
    model, _, completions = make()
    found: dict[int, str] = {}

    def ask(index: int) -> None:
        found[index] = completions.create(prompt=[60 + index] * 40, max_tokens=15).choices[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: text_of(model.greedy([60 + i] * 40, 15)) for i in range(4)}


def test_faults_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model, core, completions = make()
    step = model.step

    def faulty(*args: Any, **options: Any) -> Any:
        model.faults += (1, 2)
        return step(*args, **options)

    model.step = faulty  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, logger="kvq"):
        completions.create(prompt="abc", max_tokens=3)
        completions.create(prompt="abc", max_tokens=3)
    assert core.stats().faults == (6, 12)
    assert [r.message for r in caplog.records] == [
        "the KV cache replaced 1 NaNs and saturated 2 values beyond the fp16 range"
    ]


@pytest.mark.parametrize("draws", [DRAW, LIKELIEST])
def test_a_model_that_draws_on_its_device_gives_the_same_answers(draws: str) -> None:
    model, core, completions = make()
    prompt = list(b"hello")
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 1.5, "seed": 3, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
        {"temperature": 1.5, "seed": 3, "presence_penalty": 1.0},
    ]
    answers = []
    for model.draws in (None, draws):
        answers.append(
            [completions.create(prompt=prompt, max_tokens=20, **one).choices[0].text for one in asked]
        )
    assert answers[0] == answers[1] and len(set(answers[0])) == 3
    assert answers[0][0] == text_of(model.greedy(prompt, 20))
    # nothing left the device but what penalties, and draws that it does not know, need
    assert (0 in model.hosted) and sum(model.hosted) == 0
    model.poison = lambda seen: len(seen) == 8
    with pytest.raises(EngineError, match="not finite"):
        completions.create(prompt=prompt, max_tokens=20)
    core.check_integrity()


def test_requests_that_need_logits_share_steps_with_those_that_do_not() -> None:
    model, core, _ = make()
    model.draws = DRAW
    tokens: list[dict[int, list[int]]] = []
    params = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, frequency_penalty=0.5),
    ]
    for together in (True, False):
        found: dict[int, list[int]] = {}
        for at, sampling in enumerate(params):
            index = core.add(Request(list(b"abc"), sampling, max_tokens=10))
            while core.has_work and (not together or at == len(params) - 1):
                for answer, piece in core.step():
                    assert piece.token is not None
                    found.setdefault(answer - index + at, []).append(piece.token.id)
        tokens.append(found)
    assert tokens[0] == tokens[1]
    assert max(model.hosted) == 1


def test_log_probabilities_of_a_token_that_the_device_drew() -> None:
    model, _, completions = make()
    found = []
    for model.draws in (None, DRAW):
        choice = completions.create(prompt="hello", max_tokens=5, logprobs=2, seed=1).choices[0]
        found.append((choice.text, choice.logprobs))
    assert found[0] == found[1] and found[1][1] is not None and len(found[1][1].top_logprobs) == 5
    assert max(model.hosted) == 1, "its row alone leaves the device"
