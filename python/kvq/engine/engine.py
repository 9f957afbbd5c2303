"""``Engine``: a model, from any stage, behind OpenAI-shaped calls and offline batches."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvq.engine.completions import Chat, Completions
from kvq.engine.driver import Driver
from kvq.engine.host import EngineHost
from kvq.engine.request import FinishReason, Request, RequestStats
from kvq.engine.setup import EngineParts
from kvq.errors import ConfigError, EngineError
from kvq.runtime.sampler import SampledToken, SamplingParams


@dataclass(frozen=True)
class Generation:
    """An answer of :meth:`Engine.generate`.

    Attributes
    ----------
    text : str
    token_ids : list of int
        The tokens drawn, the one that ended the answer among them.
    tokens : list of SampledToken
        The same, with log probabilities where they were asked for.
    finish_reason : str
        ``stop`` or ``length``.
    stats : RequestStats
    """

    text: str
    tokens: list[SampledToken]
    finish_reason: FinishReason
    stats: RequestStats

    @property
    def token_ids(self) -> list[int]:
        """Ids of the tokens drawn."""
        return [token.id for token in self.tokens]


class Engine(EngineHost):
    """A model ready to answer, many requests at once; parameters are those of :class:`EngineHost`.

    Several threads may use it; their requests run in one batch.

    Attributes
    ----------
    chat.completions, completions
        ``create(...)`` as in OpenAI's client.
    """

    def _start(self, parts: EngineParts) -> None:
        super()._start(parts)
        self._driver = Driver(parts.core)
        self.completions = Completions(self._driver, self.tokenizer, self.config, self.model_name)
        self.chat = Chat(self.completions)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> list[Generation]:
        """Continue many prompts in one batch.

        Parameters
        ----------
        prompts : sequence of str or of token ids
            Texts, or token ids.
        sampling : SamplingParams or sequence of them, optional
            For all, or one for each prompt; greedy if not given.
        max_tokens : int, optional
            Most tokens of an answer; until the context is full if not given.
        stop : sequence of str
            Strings that end an answer, beside the model's own.
        ignore_eos : bool
            Go on past the model's own end.

        Returns
        -------
        list of Generation
            In the order of the prompts.

        Raises
        ------
        ConfigError
            If a prompt does not fit, or there are not as many ``sampling`` as prompts.
        EngineError
            If the engine had to end an answer.
        """
        params = sampling or SamplingParams(temperature=0)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ConfigError(
                f"{len(each)} sampling parameters for {len(prompts)} prompts: give one for each"
            )
        config = self.config
        requests = [
            Request(
                prompt=self.tokenizer.encode(prompt, add_special_tokens=True)
                if isinstance(prompt, str)
                else list(prompt),
                sampling=one,
                max_tokens=max_tokens,
                stop_ids=frozenset() if ignore_eos else frozenset(config.stop_token_ids),
                stop_strings=tuple(stop) if ignore_eos else (*stop, *config.stop_strings),
            )
            for prompt, one in zip(prompts, each, strict=True)
        ]
        for request in requests:
            self.check(request)
        texts: list[list[str]] = [[] for _ in requests]
        tokens: list[list[SampledToken]] = [[] for _ in requests]
        found: dict[int, Generation] = {}
        with contextlib.closing(self._driver.run(requests)) as pieces:
            for index, piece in pieces:
                texts[index].append(piece.text)
                if piece.token is not None:
                    tokens[index].append(piece.token)
                if piece.error is not None:
                    raise EngineError(f"prompt {index}: {piece.error}")
                if piece.finish_reason is not None:
                    assert piece.stats is not None
                    text = "".join(texts[index])
                    found[index] = Generation(text, tokens[index], piece.finish_reason, piece.stats)
        return [found[index] for index in range(len(requests))]

    def reset(self) -> None:
        """Empty the prefix cache."""
        self._driver.reset()
