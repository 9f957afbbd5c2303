"""Decode attention of other libraries, measured as ours is: shapes, CUDA graphs, a rotation over layers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from kvq.errors import ConfigError

#: A peer's launch on layer ``i``, made from lengths, heads, layers and page size; None for lengths it does
#: not take.
Peer = Callable[[Sequence[int], tuple[int, int, int], int, int], Callable[[int], Any] | None]


def _imported(module: str, install: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"--peer needs {module}, which is not installed here: {install}") from None


def _torch() -> Any:
    torch = _imported("torch", "pip install torch, with CUDA")
    if not torch.cuda.is_available():
        raise ConfigError("--peer needs PyTorch with CUDA: this PyTorch finds no GPU")
    return torch


def torch_sdpa(
    lengths: Sequence[int], heads: tuple[int, int, int], layers: int, page_size: int
) -> Callable[[int], Any] | None:
    """PyTorch's ``scaled_dot_product_attention`` over contiguous fp16 caches, equal lengths only."""
    torch = _torch()
    if len(set(lengths)) > 1:
        return None
    num_heads, kv_heads, dim = heads
    batch, length = len(lengths), lengths[0]
    q = torch.randn(batch, num_heads, 1, dim, device="cuda", dtype=torch.float16)
    caches = [
        torch.randn(2, batch, kv_heads, length, dim, device="cuda", dtype=torch.float16)
        for _ in range(layers)
    ]
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda i: attend(q, caches[i][0], caches[i][1], enable_gqa=num_heads != kv_heads)


def flashinfer(
    lengths: Sequence[int], heads: tuple[int, int, int], layers: int, page_size: int
) -> Callable[[int], Any] | None:
    """FlashInfer's batch decode over fp16 pages, scattered."""
    torch = _torch()
    library = _imported("flashinfer", "pip install flashinfer-python")
    num_heads, kv_heads, dim = heads
    pages = [-(-n // page_size) for n in lengths]
    total = sum(pages)
    indptr = torch.tensor([0, *pages], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
    order = torch.randperm(total, device="cuda").to(torch.int32)
    last = torch.tensor([(n - 1) % page_size + 1 for n in lengths], device="cuda", dtype=torch.int32)
    space = torch.zeros(256 << 20, device="cuda", dtype=torch.uint8)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=num_heads != kv_heads)
    wrapper.plan(
        indptr,
        order,
        last,
        num_heads,
        kv_heads,
        dim,
        page_size,
        q_data_type=torch.float16,
        data_type=torch.float16,
    )
    q = torch.randn(len(lengths), num_heads, dim, device="cuda", dtype=torch.float16)
    shape = (total, 2, kv_heads, page_size, dim)
    caches = [torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(layers)]
    return lambda i: wrapper.run(q, caches[i])


PEERS: dict[str, Peer] = {"torch": torch_sdpa, "flashinfer": flashinfer}


def peer_times(
    name: str,
    lengths: Sequence[int],
    heads: tuple[int, int, int],
    layers: int,
    page_size: int,
    launches: int,
    replays: int,
) -> list[float]:
    """Seconds of a launch, one figure a replay; none for lengths that the peer does not take.

    Raises
    ------
    ConfigError
        If the peer is unknown or not installed.
    """
    if name not in PEERS:
        raise ConfigError(f"--peer {name!r} is not known: use {', '.join(PEERS)}")
    torch = _torch()
    launch = PEERS[name](lengths, heads, layers, page_size)
    if launch is None:
        return []
    rounds = -(-launches // layers)
    for i in range(layers):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for i in range(layers):
                launch(i)
    seconds = []
    for i in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            seconds.append(start.elapsed_time(end) / 1e3 / (rounds * layers))
    del graph, launch
    torch.cuda.empty_cache()
    return seconds
