"""Haystacks to search: prose with numbers hidden in it, and the questions that ask for them.

needle
    Numbers in sentences of different kinds, spread over prose.
kv
    Numbers in sentences that differ in one word, the key: what is like the answer misleads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvq.errors import ConfigError

Encode = Callable[[str], list[int]]

#: In percent of a haystack.
DEFAULT_DEPTHS = (5, 15, 25, 35, 45, 55, 65, 75, 85, 95)

_FACTS = (
    "The secret number of the old library is",
    "Captain Harris was born in the year",
    "The password of the blue safe is",
    "The telephone number of the bakery is",
    "The price of the golden clock is",
    "The ticket of the last passenger is number",
    "The church of the village was built in",
    "The weight of the great elephant in pounds is",
    "The code that opens the garden gate is",
    "The height of the northern mountain in feet is",
    "The house of the famous painter has number",
    "The distance to the nearest harbour in miles is",
)
_CITIES = (
    *(
        "Amsterdam",
        "Berlin",
        "Cairo",
        "Delhi",
        "Lisbon",
        "Madrid",
        "Oslo",
        "Paris",
        "Rome",
        "Tokyo",
        "Vienna",
    ),
    *("Warsaw", "Zurich", "Boston", "Chicago", "Dublin", "Geneva", "Havana", "Lima", "Moscow", "Nairobi"),
)
#: What the numbers of a haystack are called, by task.
TASKS = {"needle": _FACTS, "kv": tuple(f"The secret number of {city} is" for city in _CITIES)}


@dataclass(frozen=True)
class Question:
    """Tokens that ask, the tokens that answer, and where the answer stands, in percent of the haystack."""

    prompt: list[int]
    answer: list[int]
    depth: int


@dataclass(frozen=True)
class Haystack:
    """Tokens to read, at most ``length`` of them, and questions about them."""

    task: str
    length: int
    ids: list[int]
    questions: list[Question]


def haystacks(
    encode: Encode,
    prose: Sequence[int],
    task: str,
    length: int,
    depths: Sequence[int],
    trials: int,
    seed: int,
) -> Iterator[Haystack]:
    """Haystacks with ``trials`` questions in all, one at each depth; the same for the same arguments.

    Parameters
    ----------
    encode : callable
        Text to token ids.
    prose : sequence of int
        Tokens of the text that the facts are hidden in.
    task : str
        A key of :data:`TASKS`.
    length : int
        Tokens of a haystack.
    depths : sequence of int
        In percent of the prose around the facts.

    Raises
    ------
    ConfigError
        If so many facts do not fit, or the prose is too short.
    """
    for number in range(-(-trials // len(depths))):
        # Seeded by text: the hash of a tuple differs from process to process.
        generator = random.Random(f"{seed} {task} {length} {number}")
        count = min(len(depths), trials - number * len(depths))
        asked = sorted(generator.sample(list(depths), count))
        names = generator.sample(TASKS[task], count)
        facts = [f"\n{name} {generator.randrange(1000, 10000)}" for name in names]
        needles = [encode(f"{fact}.\n") for fact in facts]
        room = length - sum(map(len, needles))
        if room < 0 or len(prose) < room:
            raise ConfigError(
                f"--lengths {length}: cannot hide {count} facts of {length - room} tokens in {len(prose)} "
                "tokens of text: ask for another length"
            )
        start = generator.randrange(len(prose) - room + 1)
        ids: list[int] = []
        told = 0
        for depth, needle in zip(asked, needles, strict=True):
            ids += prose[start + told : start + room * depth // 100]
            ids += needle
            told = room * depth // 100
        ids += prose[start + told : start + room]
        questions = [
            _question(encode, f"\n{name}", fact, depth)
            for name, fact, depth in zip(names, facts, asked, strict=True)
        ]
        yield Haystack(task, length, ids, questions)


def _question(encode: Encode, name: str, fact: str, depth: int) -> Question:
    """Split the tokens of a fact where those of its name end, which may be before its last letter."""
    whole, prompt = encode(fact), encode(name)
    same = next((i for i, (a, b) in enumerate(zip(whole, prompt, strict=False)) if a != b), len(prompt))
    return Question(whole[:same], whole[same:], depth)
