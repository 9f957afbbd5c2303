"""Widths of a page's key channels on a GPU: what follows for codes and header once a block has chosen."""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.layout import BASE_BITS, KVLayout


class BlockKeyWidths:
    """The widths of a page of one KV head, in shared memory; of keys of one width, only the answers.

    Attributes
    ----------
    mixed : bool
        Whether there is anything to choose.
    kind : buffer
        Where it is so, ``int32[head_dim / 2]``: 0 for a pair of channels that is wide, 1 for one of as many
        bits as the scheme says, 2 for a narrow one. Backends choose it, and the places of the codes.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.layout, self.half = layout, layout.head_dim // 2
        self.mixed = layout.k_bits is not None and len(layout.k_classes) > 1

    def levels(self, channel):
        """The largest code of a channel, int32."""
        bits = self.layout.k_bits or 0
        if not self.mixed:
            return T.int32(2**bits - 1)
        return T.shift_right(T.int32(2 ** (bits + 1)), self.kind[T.truncmod(channel, self.half)]) - 1

    def header(self, index, base):
        """Bit ``index`` of the K header, uint32; ``base`` is int32."""
        masks = self.layout.k_header_bits - BASE_BITS
        shift = T.max(index - masks, 0)
        of_base = T.cast(T.bitwise_and(T.shift_right(base, shift), 1), "uint32")
        if not self.mixed:
            return of_base
        kind = self.kind[T.truncmod(index, self.half)]
        of_pair = T.Select(kind == T.Select(index < self.half, 0, 2), T.uint32(1), T.uint32(0))
        # not a Select: it would read the kind of an index beyond the pairs as well
        return T.if_then_else(index < masks, of_pair, of_base)
