"""Pages to float32: the blocks of tokens that ``paged_attention`` walks through.

A block of keys is ``[D, tokens]``, a block of values ``[tokens, D]``. Quantized components give their codes,
which the caller scales; rows that are not quantized give their numbers.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kvq.layout import BASE_BITS, CODES_PER_CHUNK, K_LANES, KVLayout
from kvq.quantization.kv_codec import EXPONENT_OFFSET
from kvq.schedules.statements import put, run

from .row_ops import vector_lanes
from .vector import CpuIsa, code_to_float, constant, extract_code, half_to_float, splat

#: Most floats of a block: half of a small first-level cache.
BLOCK_FLOATS = 4096


class PageBlocks:
    """Emits the loads of a layout's pages.

    Attributes
    ----------
    tokens : int
        Tokens of a block.
    """

    def __init__(self, layout: KVLayout, isa: CpuIsa) -> None:
        self.layout, self.lanes = layout, isa.lanes
        self.dim, self.page = layout.head_dim, layout.page_size
        self.d_lanes = vector_lanes(self.dim, isa.lanes)
        self.tokens = min(self.page, max(K_LANES, 1 << (BLOCK_FLOATS // self.dim).bit_length() - 1))

    def _token_groups(self, block: int) -> range:
        """The groups of 16 tokens in a block."""
        count = self.tokens // K_LANES
        return range(block * count, (block + 1) * count)

    def header_bit(self, pool, unit, index: int):
        """Bit ``index`` (int or int64 expression) of a sealed page's K header, int32."""
        layout = self.layout
        if layout.header_in_v_scales:
            token, place = index % self.page, index // self.page
            word = pool[(*unit, layout.v_scale_offset + token // 2)]
            shift = 16 * (token % 2) + place
        else:
            word = pool[(*unit, layout.k_header_offset + index // 32)]
            shift = index % 32
        shifted = T.shift_right(word, T.cast(shift, "uint32"))
        return T.cast(T.bitwise_and(shifted, T.uint32(1)), "int32")

    def load_key_pairs(self, pool, unit, pairs) -> None:
        """Pairs of channels in the order in which a sealed page stores them, where widths are mixed.

        The pairs of class ``i`` of ``layout.k_classes`` start at ``self.first_pair(i)`` of ``pairs``.
        """
        half = self.dim // 2
        count = T.sblock_alloc_buffer((3,), "int32")
        for i in range(3):
            put(count, T.int32(self.first_pair(i)), i)
        with T.serial(half) as pair:
            wider = T.bind(self.header_bit(pool, unit, pair))
            narrower = T.bind(self.header_bit(pool, unit, pair + half))
            # Stored in all classes, counted in one: the next pair overwrites it in the others.
            for i, own in enumerate((wider, T.int32(1) - wider - narrower, narrower)):
                put(pairs, T.cast(pair, "int32"), count[i])
                put(count, count[i] + own, i)

    def first_pair(self, index: int) -> int:
        """Where a class starts in the list of pairs; there is room for one pair too many in each."""
        return sum(channels // 2 + 1 for _, channels in self.layout.k_classes[:index])

    def load_key_scales(self, pool, unit, scale, minimum) -> None:
        """Scales and minimums of a sealed page's channels, float32 ``[D]`` each."""
        layout = self.layout
        base = T.int32(0)
        first = layout.k_header_bits - BASE_BITS
        for i in range(BASE_BITS):
            base = T.bitwise_or(base, T.shift_left(self.header_bit(pool, unit, first + i), T.int32(i)))
        origin = T.bind((base + T.int32(EXPONENT_OFFSET)) * T.int32(16))
        with T.serial(self.dim // 8) as j:
            code = T.reinterpret("uint8x8", pool[(*unit, run(j * 2 + layout.k_scale_offset, 2))])
            log_code = T.cast(code, "int32x8") + splat(origin, 8)
            put(
                scale,
                T.reinterpret("float32x8", T.shift_left(log_code, splat(T.int32(19), 8))),
                run(j * 8, 8),
            )
            put(minimum, half_to_float(pool[(*unit, run(j * 4 + layout.k_min_offset, 4))], 8), run(j * 8, 8))

    def load_value_scales(self, pool, unit, scale) -> None:
        """Scales of a sealed page's tokens, float32 ``[P]``."""
        with T.serial(self.page // 8) as j:
            words = pool[(*unit, run(j * 4 + self.layout.v_scale_offset, 4))]
            put(scale, half_to_float(words, 8), run(j * 8, 8))

    def fill(self, buffer, extent: int, value: float) -> None:
        """Set ``extent`` numbers of ``buffer`` to ``value``."""
        with T.serial(extent // 8) as j:
            put(buffer, constant(value, 8), run(j * 8, 8))

    def load_keys(self, pool, unit, pairs, block: int, buf) -> None:
        """Key codes (or raw keys) of a block of a sealed page into ``buf[D * tokens]``."""
        lanes = self.lanes
        if self.layout.k_bits is None:
            with T.serial(self.dim) as d, T.serial(self.tokens // lanes) as j:
                start = d * self.page + block * self.tokens + j * lanes
                put(buf, self._raw(pool, unit, start, 0), run(d * self.tokens + j * lanes, lanes))
            return
        first_word = 0
        for index, (bits, channels) in enumerate(self.layout.k_classes):
            self._load_class(pool, unit, pairs, block, buf, index, first_word)
            first_word += channels * self.page * bits // 32

    def _load_class(self, pool, unit, pairs, block: int, buf, index: int, first_word: int) -> None:
        """The channels of one class, whose codes start at ``first_word``."""
        lanes, (bits, channels) = self.lanes, self.layout.k_classes[index]
        per_lane, groups = self.page // K_LANES, self._token_groups(block)
        in_chunk = CODES_PER_CHUNK // per_lane
        with T.serial(channels // in_chunk) as chunk:
            if len(self.layout.k_classes) == 1:
                where = [chunk * in_chunk + i for i in range(in_chunk)]
            else:
                listed = [
                    T.bind(pairs[chunk * (in_chunk // 2) + i + self.first_pair(index)])
                    for i in range(in_chunk // 2)
                ]
                where = [listed[i // 2] + i % 2 * (self.dim // 2) for i in range(in_chunk)]
            for sub in range(K_LANES // lanes):
                words = [
                    T.bind(pool[(*unit, run((chunk * bits + w) * K_LANES + sub * lanes + first_word, lanes))])
                    for w in range(bits)
                ]
                for channel in range(in_chunk):
                    for q in groups:
                        code = extract_code(words.__getitem__, channel * per_lane + q, bits, lanes)
                        at = where[channel] * self.tokens + (q - groups.start) * K_LANES + sub * lanes
                        put(buf, code_to_float(code, lanes), run(at, lanes))

    def load_values(self, pool, unit, block: int, buf) -> None:
        """Value codes (or raw values) of a block of a sealed page into ``buf[tokens * D]``."""
        layout, dim, lanes, bits = self.layout, self.dim, self.d_lanes, self.layout.v_bits
        if bits is None:
            with T.serial(self.tokens * dim // self.lanes) as j:
                start = block * self.tokens * dim + j * self.lanes
                put(buf, self._raw(pool, unit, start, layout.v_offset), run(j * self.lanes, self.lanes))
            return
        first = block * self.tokens
        count = min(self.tokens, CODES_PER_CHUNK)
        with T.serial(max(1, self.tokens // CODES_PER_CHUNK)) as step, T.serial(dim // lanes) as j:
            chunk = T.bind(step + first // CODES_PER_CHUNK)
            words = [
                T.bind(pool[(*unit, run((chunk * bits + w) * dim + j * lanes + layout.v_offset, lanes))])
                for w in range(bits)
            ]
            for i in range(first % CODES_PER_CHUNK, first % CODES_PER_CHUNK + count):
                t = chunk * CODES_PER_CHUNK + i - first
                code = code_to_float(extract_code(words.__getitem__, i, bits, lanes), lanes)
                put(buf, code, run(t * dim + j * lanes, lanes))

    def _raw(self, pool, unit, start, offset: int):
        """``lanes`` numbers from ``start`` of an unquantized component of a sealed page."""
        lanes = self.lanes
        if self.layout.row_dtype == "float16":
            words = pool[(*unit, run(T.truncdiv(start, 2) + offset, lanes // 2))]
            return half_to_float(words, lanes)
        return T.reinterpret(f"float32x{lanes}", pool[(*unit, run(start + offset, lanes))])

    def load_own(self, args, at, layer, head, part: int, block: int, buf) -> None:
        """K (part 0) or V (part 1) of a block of the row page ``at``."""
        kv_open, kv_workspace, num_open = args
        tokens, lanes = self.tokens, self.lanes
        outer, inner = (self.dim, tokens) if part == 0 else (1, tokens * self.dim)
        stride, first = (self.page, block * tokens) if part == 0 else (0, block * tokens * self.dim)

        def copy(rows, start):
            with T.serial(outer) as i, T.serial(inner // lanes) as j:
                row = rows[(*start, run(i * stride + first + j * lanes, lanes))]
                put(buf, T.cast(row, f"float32x{lanes}"), run(i * inner + j * lanes, lanes))

        with T.If(at < num_open):
            with T.Then():
                copy(kv_open, (at, layer, head, part))
            with T.Else():
                copy(kv_workspace, (at - num_open, head, part))
