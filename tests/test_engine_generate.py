"""``Engine``: offline batches, several choices, and requests that break among others that do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fake_model import END_OF_TURN, FakeModel, fake_core, fake_parts
from kvq.engine import Engine
from kvq.engine.request import Piece, Request
from kvq.errors import ConfigError, EngineError
from kvq.runtime.sampler import SamplingParams


def make(num_open: int = 4, pages: int | None = None, **options: Any) -> tuple[FakeModel, Engine]:
    model = FakeModel(300, 64, num_open, pages)
    return model, Engine.of(fake_parts(fake_core(model, **options)))


def text_of(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def test_a_batch_in_the_order_of_its_prompts() -> None:
    model, engine = make()
    prompts: list[Any] = ["hello", [60] * 100, "x" * 70, [61], "hello"]
    answers = engine.generate(prompts, max_tokens=20)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        assert answer.token_ids == model.greedy(ids, 20) and answer.text == text_of(answer.token_ids)
        assert answer.finish_reason == "length" and answer.stats.prompt_tokens == len(ids)
        assert answer.stats.decode_tokens == 19 and answer.stats.first_token_seconds > 0
    assert max(model.batches) == 4
    assert engine.last_request.completion_tokens == 20


def test_sampling_for_each_prompt() -> None:
    _, engine = make()
    params = [SamplingParams(temperature=1, seed=seed) for seed in (1, 2, 1)]
    first = engine.generate([[60] * 10] * 3, params, max_tokens=12)
    assert first[0].token_ids == first[2].token_ids != first[1].token_ids
    engine.reset()
    again = engine.generate([[60] * 10] * 2, params[:2][::-1], max_tokens=12)
    assert [again[1].token_ids, again[0].token_ids] == [a.token_ids for a in first[:2]]
    with pytest.raises(ConfigError, match="2 sampling parameters for 3 prompts"):
        engine.generate(["a", "b", "c"], params[:2])


def test_stops_of_a_batch() -> None:
    model, engine = make()
    model.script[8] = END_OF_TURN
    assert engine.generate(["hello"])[0].finish_reason == "stop"
    assert len(engine.generate(["hello"], max_tokens=9, ignore_eos=True)[0].token_ids) == 9
    model.script.clear()
    text = engine.generate(["other"], max_tokens=30)[0].text
    answer = engine.generate(["other"], max_tokens=30, stop=[text[12:15]])[0]
    assert answer.text == text[: text.find(text[12:15])] and answer.finish_reason == "stop"


def test_a_prompt_that_does_not_fit_is_refused_before_any_runs() -> None:
    model, engine = make(pages=4)
    with pytest.raises(ConfigError, match="a prompt of 150 tokens and max_tokens 20 exceed the 160 tokens"):
        engine.generate([[60] * 10, [61] * 150], max_tokens=20)
    assert not model.steps
    # Without max_tokens the pool ends the answer, as the context does.
    answer = engine.generate([[61] * 150])[0]
    assert answer.finish_reason == "length" and len(answer.token_ids) == 10


@pytest.mark.parametrize(("prefix", "rows"), [(True, 100 + 2 * 4), (False, 300)])
def test_choices_run_at_once_and_share_the_prompts_pages(prefix: bool, rows: int) -> None:
    model, engine = make(prefix_cache=prefix)
    create = engine.completions.create
    answer = create(prompt=[60] * 100, n=3, temperature=1.0, seed=5, max_tokens=20)
    assert engine.stats().prefill_rows == rows and max(model.batches) == 3
    singles = [
        Request([60] * 100, SamplingParams(temperature=1.0, seed=5), max_tokens=20, choice=choice)
        for choice in range(3)
    ]
    for choice, request in zip(answer.choices, singles, strict=True):
        core = fake_core(FakeModel(300, 64, 1))
        core.add(request)
        assert choice.text == "".join(piece.text for _, piece in drain(core))


def drain(core: Any) -> list[tuple[int, Piece]]:
    outputs = []
    while core.has_work:
        outputs += core.step()
    return outputs


def test_a_broken_step_ends_the_batch_with_its_error() -> None:
    model, engine = make(num_open=2)

    def fail(requests: list[tuple[Any, int]]) -> None:
        if len(model.steps) == 5:
            model.fail = None
            raise RuntimeError("broken step")

    model.fail = fail
    with pytest.raises(EngineError, match=r"prompt \d: RuntimeError: broken step"):
        engine.generate([[60] * 10, [61] * 10, [62] * 10], max_tokens=20)
    engine._core.check_integrity()
    assert engine.stats().running == engine.stats().waiting == engine.stats().used_pages == 0
    assert engine.generate([[60] * 10], max_tokens=20)[0].token_ids == model.greedy([60] * 10, 20)


class Digits:
    """Allows digits alone, and ends after three."""

    def __init__(self, fail_at: int = -1, none_at: int = -1) -> None:
        self.seen: list[int] = []
        self.fail_at, self.none_at = fail_at, none_at

    @property
    def stopped(self) -> bool:
        return len(self.seen) == 3

    def allowed(self) -> np.ndarray | None:
        if len(self.seen) == self.fail_at:
            raise ValueError("bad grammar")
        mask = np.zeros(300, bool)
        mask[48:58] = len(self.seen) != self.none_at
        return mask

    def advance(self, token: int) -> None:
        self.seen.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_narrows_the_draws_and_ends_the_answer(temperature: float) -> None:
    core = make()[1]._core
    sampling = SamplingParams(temperature=temperature, seed=1)
    constraints = [Digits(), Digits(fail_at=1), Digits(none_at=2), None]
    indices = [
        core.add(Request([60] * 40, sampling, max_tokens=10, constraint=constraint))
        for constraint in constraints
    ]
    ends: dict[int, Piece] = {}
    texts = dict.fromkeys(indices, "")
    for index, piece in drain(core):
        texts[index] += piece.text
        ends[index] = piece
    assert ends[indices[0]].finish_reason == "stop"
    assert len(texts[indices[0]]) == 3 and texts[indices[0]].isdigit()
    assert ends[indices[1]].error == "ValueError: bad grammar" and len(texts[indices[1]]) == 1
    assert ends[indices[2]].error == "ValueError: the grammar allows no further token"
    assert ends[indices[3]].finish_reason == "length" and len(texts[indices[3]]) == 10
    core.check_integrity()
    assert core.stats().failed == 2


def test_an_interrupt_ends_the_requests_of_the_step_only() -> None:
    model, engine = make(num_open=1)
    other = engine._core.add(Request([61] * 10, SamplingParams(temperature=0), max_tokens=5))

    def interrupt(requests: list[tuple[Any, int]]) -> None:
        model.fail = None
        raise KeyboardInterrupt

    model.fail = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine._core.step()
    assert other not in engine._core
    assert engine.generate([[61] * 10], max_tokens=5)[0].token_ids == model.greedy([61] * 10, 5)
