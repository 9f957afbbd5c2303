"""Decode attention of other libraries, measured as ours is: shapes, CUDA graphs, a rotation over layers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvq.errors import ConfigError


@dataclass(frozen=True)
class PeerCase:
    """A decode step for a peer.

    Attributes
    ----------
    lengths : sequence of int
        Tokens of each sequence.
    num_heads, num_kv_heads, head_dim : int
        Heads of the attention.
    layers : int
        Caches to rotate over.
    page_size : int
        Tokens of a page.
    """

    lengths: Sequence[int]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: int
    page_size: int

    @property
    def pages(self) -> list[int]:
        """Pages of each sequence."""
        return [-(-n // self.page_size) for n in self.lengths]


#: Makes a peer's launch on layer ``i``; None for a step that it does not take.
Peer = Callable[[PeerCase], Callable[[int], Any] | None]


def _imported(module: str, install: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"--peer needs {module}: {error}; {install}") from None


def torch_with_cuda() -> Any:
    """PyTorch, if it is installed and finds a GPU.

    Raises
    ------
    ConfigError
    """
    torch = _imported("torch", "pip install torch, with CUDA")
    if not torch.cuda.is_available():
        raise ConfigError("--peer needs PyTorch with CUDA: this PyTorch finds no GPU")
    return torch


def _torch_sdpa(case: PeerCase) -> Callable[[int], Any] | None:
    """PyTorch's ``scaled_dot_product_attention`` over contiguous caches of equal length."""
    torch = torch_with_cuda()
    if len(set(case.lengths)) > 1:
        return None
    batch, dim = len(case.lengths), case.head_dim
    q = torch.randn(batch, case.num_heads, 1, dim, device="cuda", dtype=torch.float16)
    shape = (2, batch, case.num_kv_heads, case.lengths[0], dim)
    caches = [torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(case.layers)]
    attend = torch.nn.functional.scaled_dot_product_attention
    grouped = case.num_heads != case.num_kv_heads
    return lambda i: attend(q, caches[i][0], caches[i][1], enable_gqa=grouped)


def _flashinfer(case: PeerCase) -> Callable[[int], Any] | None:
    """FlashInfer's batch decode over scattered pages."""
    torch = torch_with_cuda()
    library = _imported("flashinfer", "pip install flashinfer-python")
    pages, heads, dim = case.pages, case.num_kv_heads, case.head_dim
    indptr = torch.tensor([0, *pages], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
    order = torch.randperm(sum(pages), device="cuda").to(torch.int32)
    last = [(n - 1) % case.page_size + 1 for n in case.lengths]
    space = torch.zeros(256 << 20, device="cuda", dtype=torch.uint8)
    grouped = case.num_heads != heads
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=grouped)
    wrapper.plan(
        indptr,
        order,
        torch.tensor(last, device="cuda", dtype=torch.int32),
        case.num_heads,
        heads,
        dim,
        case.page_size,
        q_data_type=torch.float16,
        data_type=torch.float16,
    )
    q = torch.randn(len(case.lengths), case.num_heads, dim, device="cuda", dtype=torch.float16)
    shape = (sum(pages), 2, heads, case.page_size, dim)
    caches = [torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(case.layers)]
    return lambda i: wrapper.run(q, caches[i])


def _lmdeploy(bits: int) -> Peer:
    """LMDeploy's Triton kernel over scattered pages, fp16 or with a scale and zero a token and head."""

    def make(case: PeerCase) -> Callable[[int], Any] | None:
        torch = torch_with_cuda()
        kernel = _imported("lmdeploy.pytorch.kernels.cuda.pagedattention", "pip install lmdeploy")
        policies = _imported("lmdeploy.messages", "pip install lmdeploy").QuantPolicy
        pages, heads = case.pages, case.num_kv_heads
        total, most = sum(pages), max(pages)
        order = torch.randperm(total, device="cuda").to(torch.int32)
        table = torch.zeros(len(pages), most, device="cuda", dtype=torch.int32)
        at = 0
        for row, count in enumerate(pages):
            table[row, :count] = order[at : at + count]
            at += count
        lengths = torch.tensor(list(case.lengths), device="cuda", dtype=torch.int32)
        q = torch.randn(len(pages), case.num_heads, case.head_dim, device="cuda", dtype=torch.float16)
        shape = (total, case.page_size, heads, case.head_dim * min(bits, 8) // 8)

        def cache() -> Any:
            if bits == 16:
                return torch.randn(shape, device="cuda", dtype=torch.float16)
            return torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)

        caches = [(cache(), cache()) for _ in range(case.layers)]
        options: list[dict[str, Any]] = [{"max_seqlen_q": 1} for _ in range(case.layers)]
        if bits < 16:
            policy = policies.INT4 if bits == 4 else policies.INT8
            for option in options:
                scales = (torch.rand(total, case.page_size, heads, 2, device="cuda") * 0.1).half()
                option.update(k_scales_zeros=scales, v_scales_zeros=scales.clone(), quant_policy=policy)
        attend = kernel.flash_attn_with_kvcache
        return lambda i: attend(q, *caches[i], lengths, table, **options[i])

    return make


#: Name on the command line -> label, kernel, and bits of a cached value, scales included, at ``head_dim``.
PEERS: dict[str, list[tuple[str, Peer, Callable[[int], float]]]] = {
    "torch": [("torch fp16", _torch_sdpa, lambda dim: 16)],
    "flashinfer": [("flashinfer fp16", _flashinfer, lambda dim: 16)],
    "lmdeploy": [
        ("lmdeploy fp16", _lmdeploy(16), lambda dim: 16),
        ("lmdeploy int8", _lmdeploy(8), lambda dim: 8 + 32 / dim),
        ("lmdeploy int4", _lmdeploy(4), lambda dim: 4 + 32 / dim),
    ],
}


def check_peers(names: Sequence[str]) -> None:
    """Raise if a name is unknown.

    Raises
    ------
    ConfigError
    """
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"--peer {name!r} is not known: use {', '.join(PEERS)}")


def peer_times(peer: Peer, case: PeerCase, launches: int, replays: int) -> list[float]:
    """Seconds of a launch, one figure a replay; none for a step that the peer does not take.

    Raises
    ------
    ConfigError
        If the peer is not installed.
    """
    torch = torch_with_cuda()
    launch = peer(case)
    if launch is None:
        return []
    rounds = -(-launches // case.layers)
    for i in range(case.layers):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for i in range(case.layers):
                launch(i)
    seconds = []
    for i in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            seconds.append(start.elapsed_time(end) / 1e3 / (rounds * case.layers))
    del graph, launch
    torch.cuda.empty_cache()
    return seconds
