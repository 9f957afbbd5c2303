"""Facts hidden and found again: the haystacks, the answers of forks, the paired statistics, the command."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fake_answers import SeeingModel
from kvq.cli.main import main
from kvq.compare import Comparison
from kvq.errors import ConfigError
from kvq.eval.answers import Answers
from kvq.eval.haystacks import DEFAULT_DEPTHS, TASKS, haystacks
from kvq.eval.retrieval import mcnemar, paired_difference
from tiny_llama import TinyLlama

VOCAB = 50
PAGE = 32


def hashed(tokens: Sequence[int]) -> int:
    return zlib.crc32(bytes(tokens)) % VOCAB


def hash_model() -> SeeingModel:
    return SeeingModel(hashed, VOCAB)


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """What the model answers, computed without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(hashed(tokens))
    return tokens[len(prompt) :]


@pytest.fixture
def prompts() -> list[list[int]]:
    generator = np.random.default_rng(1)
    return [generator.integers(0, VOCAB, size).tolist() for size in (1, 20, 7, 33, 3, 12, 28)]


@pytest.mark.parametrize("shared", [0, 5, PAGE, 100])
@pytest.mark.parametrize("chunk", [8, 40])
def test_answers_are_those_of_a_model_without_a_cache(
    prompts: list[list[int]], shared: int, chunk: int
) -> None:
    begin = [i % VOCAB for i in range(shared)]
    model = hash_model()
    answers = Answers(model, chunk, VOCAB)  # type: ignore[arg-type]
    answers.begin(begin)
    expected = [greedy([*begin, *prompt], 40) for prompt in prompts]
    assert answers.greedy(prompts, 40) == expected
    assert max(model.rows) <= chunk
    for length in (1, 5, 40):
        right = [answer[:length] for answer in expected]
        assert answers.follows(prompts, right) == [True] * len(prompts)
        for place in {0, length - 1}:
            wrong = [list(answer) for answer in right]
            wrong[2][place] = (wrong[2][place] + 1) % VOCAB
            assert answers.follows(prompts, wrong) == [i != 2 for i in range(len(prompts))]
    model.cache.check_integrity()
    assert model.cache.sequence_ids == ["shared"]


def test_answers_stop_and_begin_anew(prompts: list[list[int]]) -> None:
    answers = Answers(hash_model(), 40, VOCAB)  # type: ignore[arg-type]
    for begin in ([1, 2, 3], [4] * 70):
        answers.begin(begin)
        full = [greedy([*begin, *prompt], 40) for prompt in prompts]
        ends = {answer[3] for answer in full}
        cut = [answer[: 1 + next(i for i, token in enumerate(answer) if token in ends)] for answer in full]
        assert answers.greedy(prompts, 40, lambda tokens, ends=ends: tokens[-1] in ends) == cut  # type: ignore[misc]


def test_keys_read_are_those_of_the_answers_tokens() -> None:
    model = hash_model()
    model.layout = SimpleNamespace(k_bits=4, v_bits=4, page_size=PAGE)  # type: ignore[assignment]
    positions = range(43, 46)  # of the rows that three answer tokens are drawn from
    expected = (len(positions) * PAGE, sum(p + 1 for p in positions))
    answer = greedy([*[1] * 40, 2, 3, 4, 5], 3)
    for method in ("greedy", "follows"):
        answers = Answers(model, 40, VOCAB)  # type: ignore[arg-type]
        answers.begin([1] * 40)
        if method == "greedy":
            assert answers.greedy([[2, 3, 4, 5]], 3) == [answer]
        else:
            assert answers.follows([[2, 3, 4, 5]], [answer]) == [True]
        assert (answers.read.quantized_keys, answers.read.keys) == expected


def encode(text: str) -> list[int]:
    """A token a letter, but a blank and the letter after it are one token."""
    ids: list[int] = []
    for before, letter in zip(" " + text, text, strict=False):
        if letter != " ":
            ids.append(ord(letter) + (1000 if before == " " and len(ids) else 0))
    return ids


def decode(ids: Sequence[int]) -> str:
    return "".join(f" {chr(i - 1000)}" if i >= 1000 else chr(i) for i in ids)


PROSE = encode("~" * 3000)


@pytest.mark.parametrize("task", sorted(TASKS))
def test_haystacks_hide_what_they_ask_for(task: str) -> None:
    made = list(haystacks(encode, PROSE, task, 900, DEFAULT_DEPTHS, 25, seed=3))
    assert [len(haystack.questions) for haystack in made] == [10, 10, 5]
    for haystack in made:
        assert len(haystack.ids) == 900
        text = decode(haystack.ids)
        for question in haystack.questions:
            fact = decode(question.prompt + question.answer)
            assert text.count(fact + ".\n") == 1
            name, _, value = fact.rpartition(" ")
            assert name[1:] in TASKS[task] and len(value) == 4
            # The last token of the name and the blank are the same in question and fact.
            assert decode(question.answer) == f" {value}" and decode(question.prompt) == name
            told = text[: text.index(fact)].count("~") / text.count("~")
            assert told == pytest.approx(question.depth / 100, abs=0.01)


def test_haystacks_depend_on_their_arguments_alone() -> None:
    def made(**changes: Any) -> list[Any]:
        arguments = {"task": "kv", "length": 700, "depths": (10, 50), "trials": 4, "seed": 0, **changes}
        return list(haystacks(encode, PROSE, **arguments))

    assert made() == made()
    assert made(seed=1) != made()
    first, second = made()
    assert first != second
    assert made(trials=2) == [first]


def test_an_answer_begins_where_the_tokens_differ() -> None:
    """A tokenizer may join the last letter of a name with what follows."""

    def joining(text: str) -> list[int]:
        return encode(text.replace("s 4", "§4"))

    questions = [
        question
        for haystack in haystacks(joining, PROSE, "kv", 500, (50,), 60, seed=0)
        for question in haystack.questions
    ]
    joined = [q for q in questions if ord("§") + 1000 in q.answer or ord("§") in q.answer]
    assert joined and len(joined) < len(questions)
    for question in joined:
        assert decode(question.prompt).endswith(" i")


@pytest.mark.parametrize(("length", "prose"), [(100, 3000), (900, 300)])
def test_haystacks_that_cannot_be(length: int, prose: int) -> None:
    with pytest.raises(ConfigError, match=f"--lengths {length}: cannot hide 10 facts"):
        list(haystacks(encode, PROSE[:prose], "needle", length, DEFAULT_DEPTHS, 10, seed=0))


def test_mcnemar() -> None:
    assert mcnemar(0, 0) == 1
    assert mcnemar(3, 3) == 1
    assert mcnemar(5, 0) == mcnemar(0, 5) == pytest.approx(2 / 32)
    assert mcnemar(8, 2) == pytest.approx(2 * (1 + 10 + 45) / 1024)


def test_paired_difference_takes_haystacks_as_units() -> None:
    yes, no = [True] * 4, [False] * 4
    half = [True, True, False, False]
    assert paired_difference([half], [yes]) == (-50, None)
    assert paired_difference([yes, half], [yes, half]) == (0, 0)
    delta, stderr = paired_difference([no, yes, half, half], [yes, yes, half, half])
    assert delta == -25
    # Four units of equal size: the standard error of the mean of -1, 0, 0, 0.
    assert stderr == pytest.approx(100 * np.std([-1, 0, 0, 0], ddof=1) / math.sqrt(4))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama(seed=20, gqa=3, head_dim=64).write(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(autouse=True)
def own_cache(build_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CACHE", str(build_cache))


def test_one_step_finds_what_greedy_decoding_says(checkpoint: Path) -> None:
    """On compiled kernels and quantized pages, across the end of a page."""
    generator = np.random.default_rng(5)
    (model,) = Comparison(str(checkpoint), "q0f32", ["int3"], "O1").load(300, 64, 4, 80)
    answers = Answers(model, 64, 320)
    answers.begin(generator.integers(3, 320, 150).tolist())
    prompts = [generator.integers(3, 320, size).tolist() for size in (4, 30, 41, 5)]
    told = answers.greedy(prompts, 30)
    assert len({tuple(answer) for answer in told}) == 4
    assert answers.follows(prompts, told) == [True] * 4
    for index, answer in enumerate(told):
        answer[5 * index + 3] = (answer[5 * index + 3] + 1) % 320
    assert answers.follows(prompts, told) == [False] * 4


def test_eval_retrieval(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "retrieval", str(checkpoint), "--quantization", "q0f32", "--kv", "none,int3"]
    words += ["--lengths", "300,400", "--depths", "20,80", "--trials", "3", "--chunk", "128"]
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["task"], row["kv"]) for row in rows] == [
        (task, kv) for task in ("needle", "kv") for kv in ("none", "int3")
    ]
    for row in rows:
        assert row["trials"] == 6 == sum(cell["trials"] for cell in row["cells"])
        assert row["hits"] == sum(cell["hits"] for cell in row["cells"])
        assert {cell["length"] for cell in row["cells"]} == {300, 400}
        assert row["lost"] - row["gained"] == rows[rows.index(row) // 2 * 2]["hits"] - row["hits"]
        assert 0.6 * row["keys"] < row["quantized_keys"] if row["kv"] == "int3" else not row["quantized_keys"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "6 questions a task on 300, 400 tokens" in out
    assert "int3 needle: attends to quantized pages: " in out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--task", "haystack"], "--task haystack"),
        (["--lengths", "5e2"], "--lengths 5e2"),
        (["--depths", "50,50"], "--depths"),
        (["--depths", "101"], "--depths"),
        (["--trials", "0"], "--trials 0"),
        (["--text", "absent.txt"], "absent.txt"),
        (["--lengths", "64"], "--lengths 64"),
    ],
)
def test_mistakes_are_one_line(
    checkpoint: Path, words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "retrieval", str(checkpoint), "--quantization", "q0f32", "--kv", "none"]
    assert main([*command, *words]) == 2
    problem = capsys.readouterr().err
    assert named in problem and problem.count("\n") == 1
