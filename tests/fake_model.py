"""A model whose next token is a hash of all that its cache shows it: wrong reuse cannot go unnoticed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kv_oracle import FakeDevice
from kvq.config import ChatConfig, ModelConfig
from kvq.engine.core import EngineCore
from kvq.engine.setup import EngineParts
from kvq.runtime.metadata import DRAW, LIKELIEST
from kvq.runtime.philox import uniform
from kvq.runtime.sampler import DRAW_FIELDS, SamplingParams, draw
from kvq.runtime.step_plan import build_step

#: Ids are bytes; the last ones are markers.
VOCAB = 256
END_OF_TURN = 255


class FakeModel:
    """Stands in for ``LoadedModel``: pages of 32 tokens, for as many sequences as are asked for.

    Attributes
    ----------
    steps : list of int
        Rows of each step.
    batches : list of int
        Sequences of each step.
    script : dict
        Replaces the model's own choice by length of the sequence.
    fail : callable or None
        Called with the requests of each step before it runs; may raise.
    poison : callable or None
        Whether the logits after these tokens, as far as the last of them sees them, are not finite.
    draws : str or None
        What it draws itself, as a GPU does: every token without penalties (``draw``) or the likeliest.
    hosted : list of int
        Rows of logits that each step with draws was asked for.
    """

    draws: str | None = None

    def __init__(
        self,
        context: int = 300,
        chunk: int = 64,
        num_open: int = 1,
        num_pages: int | None = None,
        window: int | None = None,
    ) -> None:
        pages = num_pages or context // 32 * num_open
        self.device = FakeDevice(pages, num_open, chunk // 32 + 1, window=window)
        self.cache = self.device.cache
        self.faults = np.zeros(2, np.int64)
        self.steps: list[int] = []
        self.batches: list[int] = []
        self.hosted: list[int] = []
        self.script: dict[int, int] = {}
        self.fail: Callable[[list[tuple[Any, int]]], None] | None = None
        self.poison: Callable[[list[int]], bool] | None = None

    def can_draw(self, params: SamplingParams) -> bool:
        return not params.changes_logits and (
            self.draws == DRAW or (self.draws == LIKELIEST and params.is_greedy)
        )

    def draw(
        self,
        requests: list[tuple[Any, int]],
        ids: Any,
        draws: np.ndarray,
        logit_rows: list[int] | None = None,
        hosted: Sequence[int] = (),
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        assert self.draws
        logits = self.step(requests, ids, logit_rows, meanwhile=meanwhile)
        self.hosted.append(len(hosted))
        tokens = []
        for at, row in enumerate(logits[:, :VOCAB]):
            fields = draws[at] if at < len(draws) else np.zeros(DRAW_FIELDS, np.int32)
            temperature, _, top_p, min_p = fields[:4].view(np.float32)
            if not np.isfinite(row).all():
                tokens.append(-1)
            elif temperature == 0:
                tokens.append(int(row.argmax()))
            else:
                params = SamplingParams(top_p=float(top_p), min_p=float(min_p), top_k=int(fields[1]))
                low, high, choice, position = (int(field) for field in fields[4:].view(np.uint32))
                weights = np.exp((row - row.max()) / temperature, dtype=np.float32)
                tokens.append(draw(weights, params, uniform(high << 32 | low, choice, position)))
        return np.array(tokens, np.int32), logits[list(hosted)]

    def step(
        self,
        requests: list[tuple[Any, int]],
        ids: Any,
        logit_rows: list[int] | None = None,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> np.ndarray:
        plan = build_step(self.device.plan, requests, 2)
        try:
            if meanwhile is not None:
                meanwhile()
            if self.fail is not None:
                self.fail(requests)
            seen = self.device.attend(plan, [int(i) for i in ids])
        except BaseException:
            plan.abort()
            raise
        plan.commit()
        self.steps.append(len(ids))
        self.batches.append(len(requests))
        if logit_rows is None:
            logit_rows = (np.cumsum([count for _, count in requests]) - 1).tolist()
        return np.stack([self._answer(seen[row]) for row in logit_rows])

    def _answer(self, seen: list[int]) -> np.ndarray:
        logits = self.logits(seen)
        if len(seen) in self.script:
            logits[self.script[len(seen)]] = 100
        if self.poison is not None and self.poison(seen):
            logits[7] = np.nan
        return logits

    @staticmethod
    def logits(seen: Sequence[int]) -> np.ndarray:
        """float32 ``[VOCAB + 8]``; printable ASCII is likely, padding is likeliest and must not be drawn."""
        generator = np.random.default_rng(zlib.crc32(bytes(seen)))
        logits = generator.normal(size=VOCAB + 8).astype(np.float32)
        logits[32:127] += 5
        logits[VOCAB:] = 50
        return logits

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """What the model says to a prompt, computed without a cache."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[:VOCAB].argmax()))
        return tokens[len(prompt) :]


class FakeStream:
    """Latin-1, one byte a token; markers are no text."""

    def put(self, index: int) -> str:
        return "" if index == END_OF_TURN else chr(index)

    def flush(self) -> str:
        return ""


class FakeTokenizer:
    """Stands in for ``Tokenizer``."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode("latin-1", "replace"))

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(i) for i in ids)

    def token_bytes(self, index: int) -> bytes:
        return bytes([index])

    def is_special(self, index: int) -> bool:
        return index == END_OF_TURN

    def token_id(self, token: str) -> int | None:
        return ord(token) if len(token) == 1 else None

    def stream(self, skip_special_tokens: bool = True) -> FakeStream:
        return FakeStream()

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> str:
        turns = [f"{m['role'][0]}:{m['content']}\xff" for m in messages]
        return "".join(turns) + "a:"


def fake_config(**changes: Any) -> ChatConfig:
    """A chat configuration for the fake model."""
    model = ModelConfig(
        model_type="llama",
        vocab_size=VOCAB + 8,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        rms_norm_eps=1e-5,
    )
    fields: dict[str, Any] = {
        "model_type": "llama",
        "quantization": "q0f32",
        "model": model,
        "vocab_size": VOCAB + 8,
        "active_vocab_size": VOCAB,
        "context_window_size": 300,
        "prefill_chunk_size": 64,
        "max_batch_size": 1,
        "conv_template": "fake",
        "temperature": 0.0,
        "stop_token_ids": [END_OF_TURN],
        **changes,
    }
    return ChatConfig(**fields)


def fake_core(model: FakeModel, context: int = 300, chunk: int = 64, **options: Any) -> EngineCore:
    """A core over a fake model."""
    return EngineCore(
        model,
        FakeTokenizer().stream,
        context_window_size=context,
        prefill_chunk_size=chunk,
        vocab_size=VOCAB,
        **options,
    )


def fake_parts(core: EngineCore, **config: Any) -> EngineParts:
    """What ``Engine.of`` and ``AsyncEngine.of`` take; nothing is planned or allocated."""
    nothing: Any = None
    tokenizer: Any = FakeTokenizer()
    return EngineParts(
        core, nothing, tokenizer, fake_config(**config), nothing, nothing, nothing, model_name="fake"
    )
