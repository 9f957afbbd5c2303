"""The sampler: what is kept, what is drawn, and that a draw depends on seed, choice and position alone."""

from __future__ import annotations

import numpy as np
import pytest

from kvq.errors import ConfigError
from kvq.runtime.philox import philox, uniform
from kvq.runtime.sampler import Sampler, SamplingParams, draw

VOCAB = 5000


def logits_of(probabilities: dict[int, float]) -> np.ndarray:
    logits = np.full(VOCAB, -30.0, np.float32)
    for token, probability in probabilities.items():
        logits[token] = np.log(probability)
    return logits


def draws(params: SamplingParams, logits: np.ndarray, count: int = 400) -> set[int]:
    return {Sampler(params, (), VOCAB).sample(logits, position).id for position in range(count)}


LOGITS = logits_of({7: 0.5, 4000: 0.25, 9: 0.125, 10: 0.075, 11: 0.05})


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({}, {7, 4000, 9, 10, 11}),
        ({"top_k": 2}, {7, 4000}),
        ({"top_k": 1}, {7}),
        ({"top_p": 0.74}, {7, 4000}),
        ({"top_p": 0.76}, {7, 4000, 9}),
        ({"top_p": 1e-6}, {7}),
        ({"min_p": 0.2}, {7, 4000, 9}),
        ({"min_p": 1.0}, {7}),
        ({"top_k": 4, "top_p": 0.99, "min_p": 0.14}, {7, 4000, 9, 10}),
        ({"temperature": 0.0}, {7}),
        ({"temperature": 1e-7}, {7}),
    ],
)
def test_what_is_kept(limits: dict[str, float], kept: set[int]) -> None:
    assert draws(SamplingParams(seed=3, **limits), LOGITS) == kept  # type: ignore[arg-type]


def test_frequencies_follow_probabilities() -> None:
    sampler = Sampler(SamplingParams(seed=1), (), VOCAB)
    drawn = [sampler.sample(LOGITS, position).id for position in range(4000)]
    for token, probability in ((7, 0.5), (4000, 0.25), (11, 0.05)):
        assert drawn.count(token) / 4000 == pytest.approx(probability, abs=0.03)


def test_top_p_over_a_flat_distribution_needs_more_than_the_first_candidates() -> None:
    flat = np.zeros(VOCAB, np.float32)
    drawn = draws(SamplingParams(seed=0, top_p=0.5), flat, 2000)
    assert len(drawn) > 1000 and max(drawn) < VOCAB // 2 + 2


def test_a_draw_depends_on_seed_choice_and_position_alone() -> None:
    logits = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)

    def tokens(seed: int, choice: int, positions: range) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed), (), VOCAB, choice)
        return [sampler.sample(logits, position).id for position in positions]

    assert tokens(5, 0, range(20))[10:] == tokens(5, 0, range(10, 20))
    assert tokens(5, 0, range(20)) != tokens(5, 1, range(20)) != tokens(6, 0, range(20))
    assert tokens(-1, 0, range(3)) == tokens(2**64 - 1, 0, range(3))


def test_without_a_seed_draws_differ() -> None:
    flat = np.zeros(VOCAB, np.float32)
    assert len({Sampler(SamplingParams(), (), VOCAB).sample(flat, 0).id for _ in range(20)}) > 10


def test_philox_gives_its_makers_numbers() -> None:
    """The known answers that come with Random123."""
    ones = 2**32 - 1
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for key, counter, expected in (
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones, ones), (ones, ones, ones, ones), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0xA4093822, 0x299F31D0), pi, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        assert philox(key, counter) == expected
    points = [uniform(7, 1, position) for position in range(4000)]
    assert min(points) >= 0 and max(points) < 1
    counts = np.histogram(points, bins=20, range=(0, 1))[0]
    assert (
        (counts - 200) ** 2 / 200
    ).sum() < 43.8  # the 0.1% point of chi-squared with 19 degrees of freedom


def test_a_draw_takes_the_token_at_its_point() -> None:
    weights = np.float32([0.25, 1, 0, 0.5, 0.25])
    for point, token in (
        (0, 0),
        (0.124, 0),
        (0.126, 1),
        (0.62, 1),
        (0.63, 3),
        (0.874, 3),
        (0.876, 4),
        (0.9999, 4),
    ):
        assert draw(weights, SamplingParams(), point) == token
    for point, token in ((0, 1), (0.66, 1), (0.67, 3), (0.9999, 3)):
        assert draw(weights, SamplingParams(top_k=2), point) == token
        assert draw(weights, SamplingParams(min_p=0.3), point) == token
        assert draw(weights, SamplingParams(top_p=0.7), point) == token
    assert draw(weights, SamplingParams(top_k=3), 0) == 0, "of equal weights the first id is kept"


def test_penalties() -> None:
    logits = np.array([2.0, 1.9, -1.0, -1.1], np.float32)
    greedy = {"temperature": 0.0}
    assert Sampler(SamplingParams(**greedy, repetition_penalty=1.2), [0], 4).sample(logits, 0).id == 1
    negative = np.array([-1.0, -1.1], np.float32)
    assert Sampler(SamplingParams(**greedy, repetition_penalty=1.2), [0], 2).sample(negative, 0).id == 1
    sampler = Sampler(SamplingParams(**greedy, presence_penalty=0.2), [0], 4)
    assert [sampler.sample(logits, i).id for i in range(3)] == [0, 1, 0]
    sampler = Sampler(SamplingParams(**greedy, frequency_penalty=0.15), [0], 4)
    assert [sampler.sample(logits, i).id for i in range(4)] == [0, 1, 0, 1]
    assert Sampler(SamplingParams(**greedy, logit_bias={3: 100}), (), 4).sample(logits, 0).id == 3
    assert logits.tolist() == pytest.approx([2.0, 1.9, -1.0, -1.1])


def test_padding_ids_are_never_drawn() -> None:
    logits = np.zeros(10, np.float32)
    logits[8:] = 50
    assert Sampler(SamplingParams(temperature=0), (), 8).sample(logits, 0).id == 0


def test_logprobs_are_the_models_own() -> None:
    params = SamplingParams(temperature=0, logit_bias={11: 100}, top_logprobs=2)
    token = Sampler(params, (), VOCAB).sample(LOGITS, 0)
    assert token.id == 11 and token.logprob == pytest.approx(np.log(0.05), abs=1e-5)
    assert [i for i, _ in token.top] == [7, 4000]
    assert token.top[0][1] == pytest.approx(np.log(0.5), abs=1e-5)


@pytest.mark.parametrize("size", [1, 7, 256, 300, 5000])
@pytest.mark.parametrize("ties", [False, True])
def test_draws_and_logprobs_are_those_of_sorting_everything(size: int, ties: bool) -> None:
    rng = np.random.default_rng(size)
    for at in range(20):
        logits = rng.normal(size=size).astype(np.float32) * 4
        if ties:
            logits = np.round(logits)
        allowed = rng.random(size) < (0.02 if at % 3 == 0 else 0.8)
        allowed[rng.integers(size)] = True
        limits = {"top_p": [1.0, 0.7][at % 2], "top_k": [0, 3, 600][at % 3], "min_p": [0.0, 0.1][at // 10]}
        params = SamplingParams(seed=at, top_logprobs=20, **limits)  # type: ignore[arg-type]
        token = Sampler(params, (), size).sample(logits, at, allowed)
        order = np.argsort(-logits, kind="stable")
        total = np.log(np.exp(logits.astype(np.float64)).sum())
        assert [index for index, _ in token.top] == order[:20].tolist()
        assert token.logprob == pytest.approx(logits[token.id] - total, abs=1e-4)

        weights = np.exp(logits - logits[allowed].max(), dtype=np.float32) * allowed
        masses = (weights * np.float32(2**41)).astype(np.int64)
        ids = [
            index
            for index in np.argsort(-weights, kind="stable")
            if weights[index] >= np.float32(params.min_p)
        ]
        ids = ids[: params.top_k or None]
        enough = int(np.ceil(float(np.float32(params.top_p)) * float(masses.sum())))
        kept = sorted(ids[: int(np.searchsorted(np.cumsum(masses[ids]), min(enough, masses.sum()))) + 1])
        sums = np.cumsum(masses[kept])
        point = int(uniform(at, 0, at) * float(sums[-1]))
        assert token.id == kept[int(np.searchsorted(sums, min(point, sums[-1] - 1), side="right"))]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-300},  # as float32 it is 0
        {"presence_penalty": 3},
        {"top_logprobs": 21},
    ],
)
def test_impossible_parameters_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_bias_of_an_unknown_id_is_refused() -> None:
    with pytest.raises(ConfigError, match="names token 4"):
        Sampler(SamplingParams(logit_bias={4: 1.0}), (), 4)
