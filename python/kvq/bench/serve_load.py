"""Requests for a server under load, from a seed: lengths as in ShareGPT's conversations, shared prefixes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvq.errors import ConfigError, check_positive

#: Median and spread (of the logarithm) of prompts and answers, in tokens: many short ones, a long tail.
_PROMPT = (60, 1.1)
_ANSWER = (110, 0.9)

#: Common words, each a token or two of any tokenizer.
_WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one had
by word but not what all were we when your can said there use an each which she do how their if will
up other about out many then them these so some her would make like him into time has look two more
write go see number no way could people my than first water been call who oil its now find long down
day did get come made may part over new sound take only little work know place year live me back
give most very after thing our just name good sentence man think say great where help through much
before line right
""".split()  # noqa: SIM905 (a list of words reads better without quotes)


@dataclass(frozen=True)
class Load:
    """What clients ask.

    Attributes
    ----------
    requests, clients : int
        Requests in all, and how many are under way at once.
    shared_part : float
        Part of the requests that begin with a shared prefix.
    prefixes, prefix_tokens : int
        Shared prefixes, and about how long each is.
    most_prompt_tokens, most_answer_tokens : int
        Longer draws are cut.
    seed : int
    """

    requests: int = 64
    clients: int = 16
    shared_part: float = 0.5
    prefixes: int = 2
    prefix_tokens: int = 512
    most_prompt_tokens: int = 1024
    most_answer_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(
            requests=self.requests,
            clients=self.clients,
            prefixes=self.prefixes,
            prefix_tokens=self.prefix_tokens,
            most_prompt_tokens=self.most_prompt_tokens,
            most_answer_tokens=self.most_answer_tokens,
        )
        if not 0 <= self.shared_part <= 1:
            raise ConfigError(f"shared_part {self.shared_part} makes no sense: it must be between 0 and 1")


@dataclass(frozen=True)
class LoadRequest:
    """One request; ``shared`` says whether it begins with a shared prefix."""

    prompt: str
    max_tokens: int
    shared: bool


def make_requests(load: Load) -> list[LoadRequest]:
    """The requests of a load; the same seed gives the same ones."""
    rng = np.random.RandomState(load.seed)
    prefixes = [_text(rng, load.prefix_tokens) for _ in range(load.prefixes)]
    # Spread evenly, so that a short load has its share too.
    shared = np.zeros(load.requests, bool)
    shared[: round(load.shared_part * load.requests)] = True
    rng.shuffle(shared)
    made = []
    for is_shared in shared.tolist():
        own = _text(rng, _length(rng, _PROMPT, load.most_prompt_tokens))
        prompt = f"{prefixes[rng.randint(load.prefixes)]} {own}" if is_shared else own
        made.append(LoadRequest(prompt, _length(rng, _ANSWER, load.most_answer_tokens), is_shared))
    return made


def _length(rng: np.random.RandomState, shape: tuple[int, float], most: int) -> int:
    median, spread = shape
    return int(np.clip(rng.lognormal(np.log(median), spread), 4, max(most, 4)))


def _text(rng: np.random.RandomState, words: int) -> str:
    return " ".join(_WORDS[i] for i in rng.randint(0, len(_WORDS), words))
