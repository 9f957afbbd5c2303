"""Rows of pages in shared memory: the blocks of tokens that ``tile_attention`` walks through."""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.layout import KVLayout
from kvq.schedules.statements import for_threads, put

#: Floats after each row of the keys and values: neighbouring rows use other banks.
PAD = 4


class PageBlocks:
    """Emits the loads of float32 pages, by all ``num_threads`` threads of a block.

    Attributes
    ----------
    tokens : int
        Tokens of a block.
    buf
        The block, float32 ``[tokens, D + PAD]``.
    """

    def __init__(self, layout: KVLayout, thread, num_threads: int) -> None:
        self.thread, self.num_threads = thread, num_threads
        self.dim = layout.head_dim
        self.tokens = 32 if self.dim <= 128 else 16
        self.buf = T.alloc_shared((self.tokens, self.dim + PAD), "float32", align=128)

    def load(self, block, number, seen) -> None:
        """A block of a page, from ``number(index)``, ``[P, D]``; zeros from token ``seen`` on."""

        def one(i):
            token, channel = T.bind(T.truncdiv(i, self.dim)), T.bind(T.truncmod(i, self.dim))
            in_page = T.bind(token + block * self.tokens)
            value = T.if_then_else(in_page < seen, number(in_page * self.dim + channel), T.float32(0))
            put(self.buf, value, token, channel)

        for_threads(self.tokens * self.dim, self.thread, self.num_threads, one)
