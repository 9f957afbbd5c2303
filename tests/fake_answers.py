"""A model whose next token is a function of all that its cache shows it, and what goes around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from kv_oracle import FakeDevice
from kvq.runtime.step_plan import build_step


class SeeingModel:
    """Stands in for ``LoadedModel``; tokens at ``vocab`` and above pad the vocabulary and are no answers."""

    def __init__(
        self, next_token: Callable[[list[int]], int], vocab: int, num_open: int = 4, num_pages: int = 40
    ) -> None:
        self.next_token, self.vocab = next_token, vocab
        self.device = FakeDevice(num_pages, num_open, 3)
        self.cache, self.layout = self.device.cache, self.device.cache.layout
        self.shape = SimpleNamespace(num_open=num_open)
        self.metadata = SimpleNamespace(quantization="fake")
        self.rows: list[int] = []

    def step(
        self, requests: list[Any], ids: Sequence[int], logit_rows: list[int] | None = None
    ) -> np.ndarray:
        plan = build_step(self.device.plan, requests, 2)
        seen = self.device.attend(plan, [int(i) for i in ids])
        plan.commit()
        self.rows.append(len(ids))
        if logit_rows is None:
            logit_rows = (np.cumsum([count for _, count in requests]) - 1).tolist()
        logits = np.zeros((len(logit_rows), self.vocab + 3), np.float32)
        logits[:, self.vocab :] = 2
        for row, at in enumerate(logit_rows):
            logits[row, self.next_token(seen[at])] = 1
        return logits


class ByteTokenizer:
    """Stands in for ``Tokenizer``: a token a byte of Latin-1."""

    vocab_size = 256

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode("latin-1"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("latin-1")


def stand_in(monkeypatch: Any, module: Any, next_tokens: dict[str, Callable[[list[int]], int]]) -> None:
    """Let an evaluation compare fake models: a function a scheme, in the place of what was compiled."""

    class Comparison:
        config_dir = None

        def __init__(
            self, model: str, quantization: str | None, schemes: list[str], opt: str, report: Any
        ) -> None:
            self.schemes = schemes

        def load(self, num_tokens: int, chunk: int, sequences: int, extra_tokens: int) -> list[SeeingModel]:
            pages = -(-num_tokens // 32) + sequences * (-(-extra_tokens // 32) + 1)
            return [SeeingModel(next_tokens[name], 256, sequences, pages) for name in self.schemes]

    monkeypatch.setattr(module, "Comparison", Comparison)
    monkeypatch.setattr(module, "Tokenizer", SimpleNamespace(from_dir=lambda _: ByteTokenizer()))
