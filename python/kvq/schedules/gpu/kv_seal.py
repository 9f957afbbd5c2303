"""kv_seal: what happens to a row page when its tokens are all there.

A workgroup has one page of one head. It writes the words of :func:`kvq.quantization.kv_codec.seal_unit`, bit
for bit: rows are read once for their ranges and once for their codes, and a thread packs a chunk of 32 codes.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.layout import CODES_PER_CHUNK, K_LANES, SCALE_MIN_EXPONENT, KVLayout
from kvq.quantization.kv_codec import EXPONENT_OFFSET
from kvq.schedules.cache_arguments import SealArguments, seal_arguments
from kvq.schedules.statements import for_threads, put, when

from .block import ATTRIBUTES, held, launch, local, reduce_lanes, shared, sync
from .halves import float_to_half, half_to_float, round_even
from .key_widths import KeyWidths
from .limits import GpuLimits
from .page_codes import whole_codes

_THREADS = 256
_BYTE = 8


def _together(pieces: list, bits: int):
    """Numbers of ``bits`` bits side by side in a word, the first the lowest."""
    word = pieces[0]
    for i, piece in enumerate(pieces[1:], 1):
        word = T.bitwise_or(word, T.shift_left(piece, T.uint32(i * bits)))
    return word


def _pack_chunk(bits: int, code, write) -> None:
    """Emit ``write(w, word)`` for the words of a chunk whose codes are ``code(index)``, uint32."""
    whole = whole_codes(bits)
    across = [T.bind(code(T.int32(i))) for i in range(whole * bits, CODES_PER_CHUNK)]
    word = local((1,), "uint32")
    with T.serial(bits) as w:
        put(word, T.uint32(0), 0)
        for i, value in enumerate(across):
            bit = T.bitwise_and(T.shift_right(value, T.cast(w, "uint32")), T.uint32(1))
            put(word, T.bitwise_or(word[0], T.shift_left(bit, T.uint32(whole * bits + i))), 0)
        with T.serial(whole) as i:
            value = T.bind(code(held(w * whole + i)))
            moved = T.shift_left(value, T.cast(i * bits, "uint32"))
            put(word, T.bitwise_or(word[0], moved), 0)
        write(w, word[0])


class _Page:
    """The statements for a page of one head, with the static geometry at hand."""

    def __init__(self, layout: KVLayout, group: int, a: SealArguments, threads: int, thread) -> None:
        self.layout, self.a, self.threads, self.thread = layout, a, threads, thread
        self.dim, self.page = layout.head_dim, layout.page_size
        self.widths = KeyWidths(layout, group, thread, threads)
        if layout.k_bits is not None:
            self.low, self.spread, self.inverse = (shared((self.dim,), "float32") for _ in range(3))
            self.log_code = shared((self.dim,), "int32")
            self.most = shared((1, threads), "int32")
        if layout.v_bits is not None:
            self.value_inverse = shared((self.page,), "float32")
            self.value_scale = shared((self.page,), "uint32")

    def seal(self, task, head) -> None:
        """The page of entry ``task``."""
        layout = self.layout
        source, target, last_row = (T.bind(self.a.tasks[task, i]) for i in range(3))
        num_open = T.cast(self.a.num_open, "int32")
        self.unit = target, self.a.layer, head

        def row(part: int, i):
            """Number ``i`` of keys or values, float32, wherever the page stands."""
            opened = self.a.kv_open[source, self.a.layer, head, part, i]
            stepped = self.a.workspace[source - num_open, head, part, i]
            return T.cast(T.if_then_else(source < num_open, opened, stepped), "float32")

        base = T.int32(0)
        if layout.k_bits is None:
            self.copy(lambda i: row(0, i), 0)
        else:
            base = self.seal_keys(lambda i: row(0, i), last_row, head)

        def header(index):
            return self.widths.header(index, base)

        if layout.v_bits is None:
            self.copy(lambda i: row(1, i), layout.v_offset)
        else:
            self.seal_values(lambda i: row(1, i), header)

        def own_word(w):
            bits = []
            for i in range(32):
                index = T.bind(T.min(w * 32 + i, layout.k_header_bits - 1))
                inside = w * 32 + i < layout.k_header_bits
                bits.append(T.bind(T.Select(inside, header(index), T.uint32(0))))
            self.write(w + layout.k_header_offset, _together(bits, 1))

        if own_words := layout.unit_words - layout.k_header_offset:
            self.each(own_words, own_word)

    def each(self, count: int, body) -> None:
        """Emit ``body(i)`` for every ``i`` below ``count``, dealt to the threads."""
        for_threads(count, self.thread, self.threads, body)

    def write(self, index, word) -> None:
        """Store a word of the unit."""
        put(self.a.pool, word, *self.unit, index)

    def copy(self, row, offset: int) -> None:
        """An unquantized component, as it is."""
        if self.layout.row_dtype == "float32":
            values = self.layout.values_per_unit
            self.each(values, lambda i: self.write(i + offset, T.reinterpret("uint32", row(i))))
            return

        def word(w):
            self.write(w + offset, _together([float_to_half(row(w * 2 + i)) for i in range(2)], 16))

        self.each(self.layout.values_per_unit // 2, word)

    def reach(self, count: int, number):
        """The least and the most of ``number(i)``, ``i < count``."""
        reach = local((2,), "float32")
        first = T.bind(number(0))
        for bound in range(2):
            put(reach, first, bound)
        with T.serial(count - 1) as i:
            value = T.bind(number(i + 1))
            put(reach, T.min(reach[0], value), 0)
            put(reach, T.max(reach[1], value), 1)
        return T.bind(reach[0]), T.bind(reach[1])

    def seal_keys(self, row, last_row, head):
        """Codes, scales and minimums of the keys, ``[D, P]``; returns the base, int32."""
        layout, page = self.layout, self.page

        def measure(c):
            start = T.bind(c * page)
            low, high = self.reach(page, lambda i: row(start + i))
            put(self.low, low, c)
            put(self.spread, high - low, c)

        def need(c):
            step = T.bind(self.spread[c] / T.cast(self.widths.levels(c), "float32"))
            code = T.shift_right(T.reinterpret("int32", step) + 0x7FFFF, 19)
            put(self.log_code, code, c)
            put(self.most, T.max(self.most[0, self.thread], code), 0, self.thread)

        self.each(self.dim, measure)
        put(self.most, 0, 0, self.thread)
        sync()
        self.widths.choose(self.a.q, last_row, head, self.spread)
        self.each(self.dim, need)
        reduce_lanes(T.max, self.most, 1, self.thread, self.threads)
        top = T.max(T.shift_right(self.most[0, 0], 4), 127 + SCALE_MIN_EXPONENT)
        base = T.bind(top - (15 + EXPONENT_OFFSET))
        origin = T.bind((base + EXPONENT_OFFSET) * 16)

        def scale(c):
            code = T.bind(T.max(self.log_code[c] - origin, 0))
            put(self.log_code, code, c)
            stored = T.reinterpret("float32", T.shift_left(code + origin, 19))
            put(self.inverse, T.float32(1) / stored, c)

        def scale_word(w):
            codes = [T.cast(self.log_code[w * 4 + i], "uint32") for i in range(4)]
            self.write(w + layout.k_scale_offset, _together(codes, _BYTE))

        def minimum(c):
            bits = float_to_half(self.low[c])
            return T.Select(bits == T.uint32(0x8000), T.uint32(0), bits)  # zero has one sign

        def minimum_word(w):
            self.write(w + layout.k_min_offset, _together([minimum(w * 2 + i) for i in range(2)], 16))

        self.each(self.dim, scale)
        sync()
        self.each(self.dim // 4, scale_word)
        self.each(self.dim // 2, minimum_word)
        tokens, channel, word = page // K_LANES, 0, 0
        for bits, channels in layout.k_classes:
            self.each(channels * page // CODES_PER_CHUNK, self.key_chunk(row, bits, channel, word))
            channel, word = channel + channels, word + channels * tokens * K_LANES * bits // 32
        return base

    def key_chunk(self, row, bits: int, first_channel: int, first_word: int):
        """The body for a lane's chunk of a class."""
        tokens = self.page // K_LANES

        def chunk(item):
            number, lane = held(T.truncdiv(item, K_LANES)), held(T.truncmod(item, K_LANES))

            def code(index):
                stored = number * (CODES_PER_CHUNK // tokens) + T.truncdiv(index, tokens) + first_channel
                stored = held(T.min(stored, self.dim - 1))
                c = held(self.widths.channel(stored))
                token = T.truncmod(index, tokens) * K_LANES + lane
                steps = T.bind((row(c * self.page + token) - self.low[c]) * self.inverse[c])
                return T.cast(T.min(round_even(steps), 2**bits - 1), "uint32")

            def write(w, word):
                self.write((number * bits + w) * K_LANES + lane + first_word, word)

            _pack_chunk(bits, code, write)

        return chunk

    def seal_values(self, row, header) -> None:
        """Codes and scales of the values, ``[P, D]``; the scales carry the header where they are to."""
        layout, dim, page, bits = self.layout, self.dim, self.page, self.layout.v_bits or 0
        half = 2 ** (bits - 1)

        def measure(token):
            start = T.bind(token * dim)
            low, high = self.reach(dim, lambda i: row(start + i))
            extreme = T.bind(T.Select(high > T.float32(0) - low, high, low))
            raw = T.bind(float_to_half(T.bind(extreme * T.float32(-1.0 / half))))
            sign = T.Select(extreme == T.float32(0), T.uint32(0x8000), T.bitwise_and(raw, T.uint32(0x8000)))
            magnitude = T.max(T.bitwise_and(raw, T.uint32(0x7FFF)), T.uint32(2))
            word = T.bind(T.bitwise_or(magnitude, sign))
            if layout.header_in_v_scales:
                word = self.carry(word, token, header)
            put(self.value_scale, word, token)
            put(self.value_inverse, T.float32(1) / half_to_float(word), token)

        def scale_word(w):
            words = [self.value_scale[w * 2 + i] for i in range(2)]
            self.write(w + layout.v_scale_offset, _together(words, 16))

        def chunk(item):
            number, channel = held(T.truncdiv(item, dim)), held(T.truncmod(item, dim))

            def code(index):
                token = held(number * CODES_PER_CHUNK + index)
                steps = T.bind(row(token * dim + channel) * self.value_inverse[token])
                return T.cast(T.max(T.min(round_even(steps) + half, 2**bits - 1), 0), "uint32")

            def write(w, word):
                self.write((number * bits + w) * dim + channel + layout.v_offset, word)

            _pack_chunk(bits, code, write)

        self.each(page, measure)
        sync()
        self.each(page // 2, scale_word)
        self.each(page // CODES_PER_CHUNK * dim, chunk)

    def carry(self, word, token, header):
        """A scale's bits whose lowest are the token's share of the header."""
        page = self.page
        every, rest = divmod(self.layout.k_header_bits, page)
        carried = T.uint32(0)
        for place in range(every + (rest > 0)):
            index = token + place * page
            bit = header(index if place < every else T.min(index, self.layout.k_header_bits - 1))
            carried = T.bind(T.bitwise_or(carried, T.shift_left(bit, T.uint32(place))))
        mask = T.Select(token < rest, T.uint32(2 ** (every + 1) - 1), T.uint32(2**every - 1))
        return T.bind(word + T.bitwise_and(carried - word, mask))  # the next that ends so


def kv_seal(layout: KVLayout, num_heads: int, limits: GpuLimits) -> tirx.PrimFunc:
    """Build the kernel; ``layout`` is in the order ``lanes``.

    Arguments of the kernel: :func:`kvq.schedules.cache_arguments.seal_arguments`. One workgroup for each
    entry of the list and head; those beyond the count have nothing to do.
    """
    threads = min(_THREADS, limits.threads)

    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        a = seal_arguments(layout, num_heads, "int32")
        with launch([layout.num_kv_heads, T.cast(a.num_tasks, "int32")], threads) as (head, task, thread):
            page = _Page(layout, num_heads // layout.num_kv_heads, a, threads, thread)
            when(task < a.counts[0], lambda: page.seal(task, head))
    return script.get()
