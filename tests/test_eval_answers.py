"""Long greedy answers with a quantized cache: as likely as those with an unquantized one, and no loopier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvq.build import BuiltModel, prepare_model
from kvq.eval.metrics import Distributions
from kvq.runtime.loaded_model import LoadedModel, load_model
from kvq.tokenizer import Tokenizer

ANSWER = 300
QUESTIONS = (
    "Explain how a steam engine turns heat into motion, step by step, for a curious twelve-year-old.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "What are the main differences between Python lists, tuples and dictionaries? Give an example of each.",
    "Describe the water cycle, and why it matters to farmers in dry countries.",
)


def longest_loop(tokens: Sequence[int]) -> int:
    """Length of the longest stretch that is one phrase at least twice over, whatever the phrase's length."""
    ids = np.asarray(tokens)
    longest = 0
    for period in range(1, len(ids) // 2 + 1):
        run = 0
        for same in ids[period:] == ids[:-period]:
            run = run + 1 if same else 0
            if run >= period:
                longest = max(longest, run + period)
    return longest


def test_longest_loop() -> None:
    assert longest_loop([1, 2, 3, 4]) == 0
    assert longest_loop([9, 1, 2, 1, 2, 1, 8]) == 5
    assert longest_loop([7, 7, 7, 1, 2, 3, 1, 2, 3]) == 6
    assert longest_loop(list(range(50))) == 0


def answer_all(model: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens after each prompt, side by side; the end of an answer is no reason to stop."""
    answers: list[list[int]] = []
    for i, prompt in enumerate(prompts):
        model.cache.add_sequence(i)
        answers.append([int(model.step([(i, len(prompt))], prompt)[-1].argmax())])
    for _ in range(ANSWER - 1):
        logits = model.step([(i, 1) for i in range(len(prompts))], [tokens[-1] for tokens in answers])
        for tokens, row in zip(answers, logits, strict=True):
            tokens.append(int(row.argmax()))
    for i in range(len(prompts)):
        model.cache.remove_sequence(i)
    return answers


def nll(model: LoadedModel, prompt: list[int], tokens: list[int]) -> float:
    """Mean negative log-likelihood of an answer, in nats a token."""
    ids = prompt + tokens[:-1]
    rows = list(range(len(prompt) - 1, len(ids)))
    model.cache.add_sequence("answer")
    found = Distributions.of(model.step([("answer", len(ids))], ids, rows))
    model.cache.remove_sequence("answer")
    return float(found.nll(np.array(tokens)).mean())


@pytest.mark.slow
def test_quantized_answers_are_as_likely(demo_gguf: Path, build_cache: Path) -> None:
    def built(kv: str) -> BuiltModel:
        return prepare_model(demo_gguf, "q4f16_1", kv, opt="O1", cache_dir=build_cache)

    def loaded(kv: str) -> LoadedModel:
        pair = built(kv)
        return load_model(pair.library, pair.weights_dir, context_window_size=512, max_batch_size=4)

    tokenizer = Tokenizer.from_dir(built("none").config_dir)
    prompts = [
        tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": question}]))
        for question in QUESTIONS
    ]
    none = loaded("none")
    own = answer_all(none, prompts)
    own_nll = np.mean([nll(none, prompt, tokens) for prompt, tokens in zip(prompts, own, strict=True)])
    own_loop = max(longest_loop(tokens) for tokens in own)
    for kv in ("int4", "int3"):
        model = loaded(kv)
        answers = answer_all(model, prompts)
        assert answers != own, "a quantized cache that changes nothing in 1,200 tokens is not in use"
        likelihood = np.mean([nll(none, p, tokens) for p, tokens in zip(prompts, answers, strict=True)])
        assert likelihood < 1.15 * own_nll, (kv, likelihood, own_nll)
        assert max(longest_loop(tokens) for tokens in answers) <= own_loop, kv
