"""Greedy agreement: the passages, the first difference, and the command over models that answer by rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fake_answers import stand_in
from kvq.cli.main import main
from kvq.errors import ConfigError
from kvq.eval import generate
from kvq.eval.generate import divergence, passages


def test_divergence() -> None:
    assert divergence([1, 2, 3], [1, 2, 3]) == 3
    assert divergence([1, 2, 3], [1, 5, 3]) == 1
    assert divergence([4, 2, 3], [1, 2, 3]) == 0


def test_passages_are_spread_over_each_text() -> None:
    long, short = list(range(100)), list(range(1000, 1020))
    prompts = passages([long, short], 5, 10)
    assert [prompt[0] for prompt in prompts] == [0, 1000, 30, 1005, 60]
    assert all(prompt == list(range(prompt[0], prompt[0] + 10)) for prompt in prompts)
    assert passages([short], 1, 20) == [short]
    with pytest.raises(ConfigError, match="--prompt-tokens 21: a text has only 20 tokens"):
        passages([long, short], 2, 21)


def test_eval_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model counts the tokens it sees; the other loses count after so many, or in some passages never."""
    text = tmp_path / "text.txt"
    text.write_text("ab" * 200)

    def counting(seen: list[int]) -> int:
        return len(seen) % 251

    def losing(seen: list[int]) -> int:
        lost = len(seen) >= 70 + 4 and seen[0] == ord("a")
        return len(seen) % 250 + 1 if lost else len(seen) % 251

    stand_in(monkeypatch, generate, {"none": counting, "int3": losing})
    words = ["eval", "generate", "MODEL", "--kv", "none,int3", "--text", str(text), "--chunk", "32"]
    words += ["--prompts", "19", "--prompt-tokens", "70", "--tokens", "12"]
    assert main([*words, "--json"]) == 0
    none, int3 = json.loads(capsys.readouterr().out)
    starts = [330 * number // 19 for number in range(19)]
    expected = [12 if start % 2 else 4 for start in starts]
    assert none["divergence"] == [12] * 19 and none["identical_percent"] == 100
    assert int3["divergence"] == expected and len(set(expected)) == 2
    assert int3["identical_percent"] == pytest.approx(100 * expected.count(12) / 19)
    assert int3["median_divergence"] == sorted(expected)[9]
    # A token of an answer is drawn from the row before it.
    assert none["keys"] == 19 * sum(range(70, 82))
    assert main(words) == 0
    assert "19 prompts of 70 tokens, 12 tokens each" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--prompts", "0"], "--prompts 0"),
        (["--tokens", "0"], "--tokens 0"),
        (["--prompt-tokens", "0"], "--prompt-tokens 0"),
        (["--text", ","], "--text"),
        (["--text", "absent.txt"], "absent.txt"),
        (["--kv", "int5"], "int5"),
    ],
)
def test_mistakes_are_one_line(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "generate", "MODEL", *words]) == 2
    problem = capsys.readouterr().err
    assert named in problem and problem.count("\n") == 1
