"""Whole steps of other libraries on the shape of a model, with random weights: what a step of ours is beside.

PyTorch in fp16 with a contiguous cache, a Llama written down plainly: ``torch`` launches its operations one
by one, ``torch-compile`` has the layers compiled by Inductor and decoding recorded as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvq.bench.attention_peers import torch_with_cuda
from kvq.bench.timing import timed
from kvq.config import ModelConfig
from kvq.errors import ConfigError

#: Families whose layers are those of Llama, with or without biases of Q, K and V.
_FAMILIES = ("llama", "mistral", "qwen2")
_DEVIATION = 0.02


class StepPeer(Protocol):
    """Another library with a model of the shape.

    Attributes
    ----------
    label : str
        What stands in a table.
    """

    label: str

    def decoding(self, batch: int, context: int, steps: int) -> Callable[[], float]:
        """A round: seconds of ``steps`` greedy steps of ``batch`` sequences of ``context`` tokens."""
        ...

    def prefilling(self, length: int) -> Callable[[], float]:
        """A round: seconds of a prompt of ``length`` tokens, until its likeliest next token is known."""
        ...

    def release(self) -> None:
        """Give all memory back."""
        ...


def make_peer(name: str, model: ModelConfig) -> StepPeer:
    """A peer of :data:`PEERS`, with weights on the GPU.

    Raises
    ------
    ConfigError
        If it is not installed, or has no such model.
    """
    check_peers([name])
    if model.model_type not in _FAMILIES:
        raise ConfigError(f"--peer {name} has no model of {model.model_type}: use a shape of Llama's kind")
    return PEERS[name](model)


def check_peers(names: list[str]) -> None:
    """Raise a ConfigError if a name is unknown."""
    for name in names:
        if name not in PEERS:
            raise ConfigError(
                f"--peer {name!r} is not known: use {' or '.join(PEERS)}; servers such as vLLM's or "
                "LMDeploy's are measured by kvq bench serve --url"
            )


class TorchModel:
    """A Llama in PyTorch.

    Parameters
    ----------
    compiled : bool
        Whether layers are compiled, and decoding is recorded.
    """

    def __init__(self, model: ModelConfig, compiled: bool) -> None:
        self.torch = torch = torch_with_cuda()
        self.model, self.compiled = model, compiled
        self.label = "torch compiled" if compiled else "torch eager"
        heads, kv_heads, dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
        width = (heads + 2 * kv_heads) * dim

        def matrix(rows: int, columns: int) -> Any:
            return torch.empty(rows, columns, device="cuda", dtype=torch.float16).normal_(std=_DEVIATION)

        self.layers = [
            {
                "norm": torch.ones(model.hidden_size, device="cuda", dtype=torch.float16),
                "qkv": matrix(width, model.hidden_size),
                "bias": matrix(1, width)[0] if model.attention_bias else None,
                "out": matrix(model.hidden_size, heads * dim),
                "mlp_norm": torch.ones(model.hidden_size, device="cuda", dtype=torch.float16),
                "gate_up": matrix(2 * model.intermediate_size, model.hidden_size),
                "down": matrix(model.hidden_size, model.intermediate_size),
            }
            for _ in range(model.num_hidden_layers)
        ]
        self.embedding = matrix(model.vocab_size, model.hidden_size)
        self.head = (
            self.embedding if model.tie_word_embeddings else matrix(model.vocab_size, model.hidden_size)
        )
        self._layer = torch.compile(self._plain_layer, dynamic=False) if compiled else self._plain_layer

    def _plain_layer(
        self, x: Any, weights: dict[str, Any], cache: Any, positions: Any, turn: Any, prompt: bool
    ) -> Any:
        """One layer for ``x[batch, rows, hidden]``; writes its cache, two ``[batch, heads, room, dim]``."""
        functional, model = self.torch.nn.functional, self.model
        heads, kv_heads, dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
        batch, rows, hidden = x.shape
        h = functional.rms_norm(x, (hidden,), weights["norm"], model.rms_norm_eps)
        qkv = functional.linear(h, weights["qkv"], weights["bias"])
        qkv = qkv.view(batch, rows, heads + 2 * kv_heads, dim).transpose(1, 2)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        cos, sin = turn
        q, k = (
            part * cos + self.torch.cat([-part[..., dim // 2 :], part[..., : dim // 2]], -1) * sin
            for part in (q, k)
        )
        # tensors of their own: of a view, Inductor would copy the whole
        for kept, rows_of in zip(cache, (k, v), strict=True):
            kept.index_copy_(2, positions, rows_of)
        if not prompt:
            k, v = cache
        attended = functional.scaled_dot_product_attention(
            q, k, v, is_causal=prompt, enable_gqa=heads != kv_heads
        )
        x = x + functional.linear(attended.transpose(1, 2).reshape(batch, rows, -1), weights["out"])
        h = functional.rms_norm(x, (hidden,), weights["mlp_norm"], model.rms_norm_eps)
        gate, up = functional.linear(h, weights["gate_up"]).chunk(2, dim=-1)
        return x + functional.linear(functional.silu(gate) * up, weights["down"])

    def _forward(self, ids: Any, caches: list[Any], positions: Any, prompt: bool) -> Any:
        """The likeliest tokens ``[batch]`` after ``ids[batch, rows]``."""
        torch, dim = self.torch, self.model.head_dim
        powers = torch.arange(0, dim, 2, device="cuda", dtype=torch.float32) / dim
        angles = positions[:, None].float() * self.model.rope_theta**-powers
        angles = torch.cat([angles, angles], -1)
        turn = angles.cos().half(), angles.sin().half()
        x = torch.nn.functional.embedding(ids, self.embedding)
        for weights, cache in zip(self.layers, caches, strict=True):
            x = self._layer(x, weights, cache, positions, turn, prompt)
        return torch.nn.functional.linear(x[:, -1], self.head).argmax(-1)

    def _caches(self, batch: int, room: int) -> list[Any]:
        shape = (batch, self.model.num_key_value_heads, room, self.model.head_dim)

        def make() -> Any:
            return self.torch.randn(shape, device="cuda", dtype=self.torch.float16)

        return [(make(), make()) for _ in self.layers]

    def decoding(self, batch: int, context: int, steps: int) -> Callable[[], float]:
        """As of :class:`StepPeer`; attention is over the cache's whole room of ``context + steps`` tokens."""
        torch = self.torch
        caches = self._caches(batch, context + steps)
        ids = torch.ones(batch, 1, device="cuda", dtype=torch.int64)
        positions = torch.full((1,), context, device="cuda", dtype=torch.int64)

        def step() -> None:
            with torch.no_grad():
                ids.copy_(self._forward(ids, caches, positions, prompt=False)[:, None])
                positions.add_(1)

        launch = step
        if self.compiled:
            for _ in range(3):
                positions.fill_(context)
                step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            launch = graph.replay

        def work() -> None:
            positions.fill_(context)
            for _ in range(steps):
                launch()
                ids.tolist()

        return lambda: timed(work)

    def prefilling(self, length: int) -> Callable[[], float]:
        """As of :class:`StepPeer`, in one step."""
        torch = self.torch
        caches = self._caches(1, length)
        ids = torch.randint(0, self.model.vocab_size, (1, length), device="cuda")
        positions = torch.arange(length, device="cuda")

        def work() -> None:
            with torch.no_grad():
                self._forward(ids, caches, positions, prompt=True).tolist()

        return lambda: timed(work)

    def release(self) -> None:
        """As of :class:`StepPeer`."""
        self.layers, self.embedding, self.head = [], None, None
        self.torch.cuda.empty_cache()


#: Name on the command line -> what makes the peer.
PEERS: dict[str, Callable[[ModelConfig], StepPeer]] = {
    "torch": lambda model: TorchModel(model, compiled=False),
    "torch-compile": lambda model: TorchModel(model, compiled=True),
}
