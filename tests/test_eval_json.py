"""Structured answers: the tasks, what counts as valid, and the command over models that answer by rule."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from fake_answers import stand_in
from kvq.cli.main import main
from kvq.errors import ConfigError
from kvq.eval import structured
from kvq.eval.json_tasks import KINDS, prompt, task_sets
from kvq.eval.structured import judge

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('{"a": 1}', (True, True, True)),
        ('{"a": 2}', (True, True, False)),
        ('{"a": "1"}', (True, False, False)),
        ("[]", (True, False, False)),
        ('{"a": 1', (False, False, False)),
        ('{"a": NaN}', (False, False, False)),
        ('{"a": 1} and more', (False, False, False)),
        ("", (False, False, False)),
    ],
)
def test_judge(answer: str, expected: tuple[bool, bool, bool]) -> None:
    assert judge(answer, SCHEMA, {"a": 1}) == expected


def test_judge_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "jsonschema":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"install kvq\[eval\]"):
        judge("{}", {}, {})


@pytest.mark.parametrize("tasks", [1, 3, 4, 30])
def test_tasks_are_shared_out_and_new(tasks: int) -> None:
    sets = task_sets(tasks, 6, seed=1)
    counts = [len(each.sentences) for each in sets]
    assert sum(counts) == tasks and max(counts) - min(counts) <= 1 and len(sets) == min(tasks, len(KINDS))
    for each in sets:
        assert len(set(each.sentences)) == len(each.sentences) == len(each.expected)
        assert not any(prompt(sentence) in each.examples for sentence in each.sentences)
        assert 1 <= each.examples.count("Text: ") <= 6
        for expected in each.expected:
            assert Draft202012Validator(each.kind.schema).is_valid(expected)


def test_tasks_depend_on_the_seed_alone() -> None:
    assert task_sets(12, 4, seed=2) == task_sets(12, 4, seed=2) != task_sets(12, 4, seed=3)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_schemas_refuse_what_is_wrong(kind: Any) -> None:
    Draft202012Validator.check_schema(kind.schema)
    (each,) = (one for one in task_sets(4, 1, seed=0) if one.kind is kind)
    (right,) = each.expected
    valid = Draft202012Validator(kind.schema).is_valid
    for name in right:
        assert not valid({key: value for key, value in right.items() if key != name})
        assert not valid({**right, name: None})
    assert not valid({**right, "more": 1})


def answers(tasks: int) -> dict[str, str]:
    """What a perfect model says to each sentence."""
    return {
        sentence: json.dumps(expected)
        for each in task_sets(tasks, 3, seed=0)
        for sentence, expected in zip(each.sentences, each.expected, strict=True)
    }


def test_eval_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The second model leaves out a brace, renames a key or adds a blank, as sentences go by."""
    right = answers(8)
    faults = {sentence: number % 4 for number, sentence in enumerate(right)}

    def says(wholes: dict[str, str]) -> Callable[[list[int]], int]:
        def next_token(seen: list[int]) -> int:
            sentence, _, told = bytes(seen).decode().rpartition("Text: ")[2].partition("\nJSON:")
            # An example is read, not asked.
            return f" {wholes[sentence]}\n\n".encode()[len(told)] if sentence in wholes else 0

        return next_token

    spoil = (
        str,
        lambda t: t[:-1],
        lambda t: t.replace('{"', '{"the ', 1),
        lambda t: t.replace(": ", ":  ", 1),
    )
    faulty = {sentence: spoil[faults[sentence]](whole) for sentence, whole in right.items()}
    stand_in(monkeypatch, structured, {"none": says(right), "int4": says(faulty)})
    monkeypatch.setattr(structured, "MAX_TOKENS", 120)
    words = ["eval", "json", "MODEL", "--kv", "none,int4", "--tasks", "8", "--examples", "3", "--chunk", "64"]
    assert main([*words, "--json"]) == 0
    none, int4 = json.loads(capsys.readouterr().out)
    for name in ("json", "valid", "correct", "same"):
        assert none[f"{name}_percent"] == 100
    assert [kind["tasks"] for kind in none["kinds"]] == [2, 2, 2, 2]
    share = [100 * sum(fault in kept for fault in faults.values()) / 8 for kept in ({0, 2, 3}, {0, 3}, {0})]
    assert [int4["json_percent"], int4["valid_percent"], int4["same_percent"]] == share
    assert int4["correct_percent"] == int4["valid_percent"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "8 tasks after 3 examples" in out and "prefill chunk: 64" in out


@pytest.mark.parametrize("option", ["--tasks", "--examples"])
def test_mistakes_are_one_line(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "json", "MODEL", option, "0"]) == 2
    problem = capsys.readouterr().err
    assert f"{option} 0" in problem and problem.count("\n") == 1
