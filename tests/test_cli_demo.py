"""``kvq demo`` and ``kvq chat`` as a user runs them, on the demo model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import vulkan_runner

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(demo_gguf: Path, build_cache: Path) -> dict[str, str]:
    """A cache directory of its own, with the model that is there already."""
    link = build_cache / demo_gguf.name
    if not link.exists():
        link.symlink_to(demo_gguf)
    return {**os.environ, "KVQ_CACHE": str(build_cache)}


def kvq(environment: dict[str, str], *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvq", *words], env=environment, input=stdin, capture_output=True, text=True
    )


def test_demo_answers_and_shows_what_the_cache_cost(environment: dict[str, str]) -> None:
    done = kvq(environment, "demo", "--max-tokens", "80")
    assert done.returncode == 0, done.stderr
    answer, table = done.stdout.split("what the KV cache costs")
    assert "gravity" in answer.lower() and len(answer.split()) > 20
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines() if line.strip()}
    assert rows["int4"][:3] == ["4.31", "6210", "27.0%"] and rows["fp16"][:3] == ["16.00", "23040", "100.0%"]
    assert "tokens/s" in table
    assert "memory plan: weights" in done.stderr and "Traceback" not in done.stderr


def test_chat_answers_a_prompt_once(environment: dict[str, str]) -> None:
    words = ["chat", "smollm2", "--prompt", "What is the capital of Japan?", "--temperature", "0"]
    done = kvq(environment, *words, "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    assert "Tokyo" in done.stdout
    assert kvq(environment, *words, "--max-tokens", "12").stdout == done.stdout


def test_chat_in_turns(environment: dict[str, str]) -> None:
    lines = ["/set temperature=0", "/set max_tokens=10", "What is the capital of Japan?", "And of Italy?"]
    done = kvq(environment, "chat", "smollm2", stdin="\n".join([*lines, "/stats", "/nothing", "/exit", ""]))
    assert done.returncode == 0, done.stderr
    assert "Tokyo" in done.stdout and "Rome" in done.stdout
    assert "of them from the cache" in done.stdout and "4.31 bits per value" in done.stdout
    assert "error: no command /nothing" in done.stderr


def test_chat_ends_with_its_input(environment: dict[str, str]) -> None:
    assert kvq(environment, "chat", "smollm2").returncode == 0


def test_a_small_context_ends_with_length(environment: dict[str, str]) -> None:
    # The whole answer would be longer: 34 tokens of prompt leave 30.
    done = kvq(
        environment,
        *("chat", "smollm2", "--prompt", "What is gravity?", "--temperature", "0"),
        *("--context-window-size", "64"),
    )
    assert done.returncode == 0 and "[length]" in done.stderr


@pytest.mark.vulkan
@pytest.mark.skipif(vulkan_runner.missing() is not None, reason=str(vulkan_runner.missing()))
def test_demo_on_a_vulkan_device(environment: dict[str, str]) -> None:
    """The CPU's greedy tokens: the two largest logits are more than 1 apart at each of them."""
    words = ("demo", "--max-tokens", "8")
    expected, found = (kvq(environment, *words, "--device", device) for device in ("cpu", "vulkan"))
    assert found.returncode == 0, found.stderr
    answer, table = found.stdout.split("what the KV cache costs")
    assert answer.strip() == expected.stdout.split("what the KV cache costs")[0].strip()
    assert "fundamental concept" in answer and "tokens/s" in table
    assert "KV pool" in found.stderr and "Traceback" not in found.stderr
