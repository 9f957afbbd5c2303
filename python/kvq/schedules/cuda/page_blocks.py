"""Pages to float32 in shared memory: the blocks of tokens that ``tile_attention`` walks through."""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.layout import BASE_BITS, KVLayout
from kvq.quantization.kv_codec import EXPONENT_OFFSET

from .block import for_threads, put
from .page_codes import CodePlace

#: Floats after each row of the keys and values: neighbouring rows use other banks.
PAD = 4


class PageBlocks:
    """Emits the loads of a layout's pages, by all ``num_threads`` threads of a block.

    Attributes
    ----------
    tokens : int
        Tokens of a block.
    buf
        The block, float32 ``[tokens, D + PAD]``.
    """

    def __init__(self, layout: KVLayout, thread, num_threads: int) -> None:
        self.layout, self.thread, self.num_threads = layout, thread, num_threads
        self.dim, self.page = layout.head_dim, layout.page_size
        self.tokens = 32 if self.dim <= 128 else 16
        self.buf = T.alloc_shared((self.tokens, self.dim + PAD), "float32", align=128)
        self.k_scale, self.k_minimum = (T.alloc_shared((self.dim,), "float32") for _ in range(2))
        self.v_scale = T.alloc_shared((self.page,), "float32")

    def load_scales(self, word) -> None:
        """Scales and minimums of a sealed page, from ``word(index)`` of its unit."""
        layout = self.layout

        def half_float(index, offset):
            pair = word(offset + T.shift_right(index, 1))
            raw = T.shift_right(pair, T.cast(T.bitwise_and(index, 1) * 16, "uint32"))
            return T.cast(T.reinterpret("float16", T.cast(raw, "uint16")), "float32")

        if layout.k_bits is not None:
            if layout.header_in_v_scales:
                base = T.uint32(0)
                for bit in range(BASE_BITS):
                    raw = T.shift_right(word(layout.v_scale_offset + bit // 2), T.uint32(bit % 2 * 16))
                    lowest = T.bitwise_and(raw, T.uint32(1))
                    base = T.bitwise_or(base, T.shift_left(lowest, T.uint32(bit)))
            else:
                base = T.bitwise_and(word(layout.k_header_offset), T.uint32(255))
            origin = T.bind((T.cast(base, "int32") + EXPONENT_OFFSET) * 16)

            def channel(d):
                raw = T.shift_right(
                    word(layout.k_scale_offset + T.shift_right(d, 2)), T.cast(d % 4 * 8, "uint32")
                )
                code = T.cast(T.bitwise_and(raw, T.uint32(255)), "int32")
                put(self.k_scale, T.reinterpret("float32", T.shift_left(code + origin, 19)), d)
                put(self.k_minimum, half_float(d, layout.k_min_offset), d)

            for_threads(self.dim, self.thread, self.num_threads, channel)
        if layout.v_bits is not None:
            for_threads(
                self.page,
                self.thread,
                self.num_threads,
                lambda t: put(self.v_scale, half_float(t, layout.v_scale_offset), t),
            )

    def each_value(self, block, body) -> None:
        """Emit ``body(token in the block, token in the page, channel)`` for a block of tokens."""

        def one(i):
            token = T.bind(T.truncdiv(i, self.dim))
            body(token, T.bind(token + block * self.tokens), T.bind(T.truncmod(i, self.dim)))

        for_threads(self.tokens * self.dim, self.thread, self.num_threads, one)

    def load_sealed(self, part: int, block, word) -> None:
        """A block of keys (part 0) or values of a sealed page into ``buf``."""
        layout = self.layout
        bits = layout.v_bits if part else layout.k_bits
        offset = layout.v_offset if part else 0

        def one(token, in_page, channel):
            if bits is None and layout.row_dtype == "float32":
                value = T.reinterpret("float32", word(offset + in_page * self.dim + channel))
            else:
                place = CodePlace(layout, bits or 16, bool(part), in_page, channel)
                code = place.read(lambda index: word(offset + index))
                if bits is None:
                    value = T.cast(T.reinterpret("float16", T.cast(code, "uint16")), "float32")
                elif part:
                    number = T.cast(T.cast(code, "int32") - 2 ** (bits - 1), "float32")
                    value = number * self.v_scale[in_page]
                else:
                    value = T.cast(code, "float32") * self.k_scale[channel] + self.k_minimum[channel]
            put(self.buf, value, token, channel)

        self.each_value(block, one)

    def load_rows(self, part: int, block, row, seen) -> None:
        """A block of the own page, from ``row(part, index)``; zeros from token ``seen`` on."""

        def one(token, in_page, channel):
            at = in_page * self.dim + channel
            value = T.if_then_else(in_page < seen, T.cast(row(part, at), "float32"), T.float32(0))
            put(self.buf, value, token, channel)

        self.each_value(block, one)
