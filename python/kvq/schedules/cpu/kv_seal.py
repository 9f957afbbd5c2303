"""kv_seal: what happens to a row page when its tokens are all there.

``kv_seal`` quantizes each row page of ``seal_tasks`` into its pool page; one task is one page of one head.
It writes the words of :func:`kvq.quantization.kv_codec.seal_unit`, bit for bit. The list is usually
empty in decode. The row that completes a page is always in the step, so its queries are at hand: they say
which channels matter, and no state has to be kept for it.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.layout import BASE_BITS, CODES_PER_CHUNK, K_LANES, SCALE_MIN_EXPONENT, KVLayout
from kvq.quantization.kv_codec import EXPONENT_OFFSET
from kvq.schedules.cache_arguments import seal_arguments
from kvq.schedules.statements import put, run

from .key_widths import KeyWidths
from .row_ops import vector_lanes
from .vector import CpuIsa, constant, place_code, reduce_lanes, rint, row_page_to_float, splat


def _pack(words: list, index: int, bits: int, codes, lanes: int) -> None:
    """Put code ``index`` of a chunk (uint32 lanes) into the list of its ``bits`` words."""
    for word, source_bit, shift in place_code(index, bits):
        piece = codes
        if source_bit is not None:
            piece = T.shift_right(piece, splat(T.uint32(source_bit), lanes)) if source_bit else piece
            piece = T.bitwise_and(piece, splat(T.uint32(1), lanes))
        if shift:
            piece = T.shift_left(piece, splat(T.uint32(shift), lanes))
        words[word] = T.bind(piece if words[word] is None else T.bitwise_or(words[word], piece))


def _seal_keys(pool, unit, kt, classes, queries, header, layout: KVLayout, lanes: int, red) -> None:
    """Codes, scales and minimums of the keys ``kt[D * P]``, and the bits of the K header."""
    dim, page = layout.head_dim, layout.page_size
    per_lane = page // K_LANES
    mixed = len(layout.k_classes) > 1
    low = T.sblock_alloc_buffer((dim,), "float32")
    spread = T.sblock_alloc_buffer((dim,), "float32")
    levels = T.sblock_alloc_buffer((dim,), "float32")
    order = T.sblock_alloc_buffer((dim,), "int32")
    inverse = T.sblock_alloc_buffer((dim,), "float32")
    log_code = T.sblock_alloc_buffer((dim,), "int32")
    top = T.sblock_alloc_buffer((1,), "int32")
    put(top, T.int32(127 + SCALE_MIN_EXPONENT), 0)
    with T.serial(dim) as d:
        least = most = kt[run(d * page, lanes)]
        for v in range(1, page // lanes):
            x = T.bind(kt[run(d * page + v * lanes, lanes)])
            least, most = T.bind(T.min(least, x)), T.bind(T.max(most, x))
        minimum = T.bind(reduce_lanes(T.min, least, red, lanes) + T.float32(0))
        put(low, minimum, d)
        put(spread, reduce_lanes(T.max, most, red, lanes) - minimum, d)
    if mixed:
        classes.choose(*queries, spread, levels, order, header)
    with T.serial(dim) as d:
        need = spread[d] / (levels[d] if mixed else T.float32(2**layout.k_bits - 1))
        rounded_up = T.reinterpret("int32", need) + T.int32(0x7FFFF)
        put(log_code, T.shift_right(rounded_up, T.int32(19)), d)
        put(top, T.max(top[0], T.shift_right(log_code[d], T.int32(4))), 0)
    base = T.bind(top[0] - T.int32(15 + EXPONENT_OFFSET))
    for i in range(BASE_BITS):
        bit = T.bitwise_and(T.shift_right(base, T.int32(i)), T.int32(1))
        put(header, T.cast(bit, "uint32"), layout.k_header_bits - BASE_BITS + i)
    origin = T.bind((base + T.int32(EXPONENT_OFFSET)) * T.int32(16))
    with T.serial(dim) as d:
        code = T.bind(T.max(log_code[d] - origin, T.int32(0)))
        put(log_code, code, d)
        scale = T.reinterpret("float32", T.shift_left(code + origin, T.int32(19)))
        put(inverse, T.float32(1) / scale, d)
    with T.serial(dim // 4) as w:
        word = T.cast(log_code[w * 4], "uint32")
        for i in range(1, 4):
            word = T.bitwise_or(word, T.shift_left(T.cast(log_code[w * 4 + i], "uint32"), T.uint32(8 * i)))
        put(pool, word, *unit, w + layout.k_scale_offset)
    with T.serial(dim // 2) as w:
        halves = [
            T.cast(T.reinterpret("uint16", T.cast(low[w * 2 + i], "float16")), "uint32") for i in range(2)
        ]
        put(
            pool,
            T.bitwise_or(halves[0], T.shift_left(halves[1], T.uint32(16))),
            *unit,
            w + layout.k_min_offset,
        )
    first_channel = first_word = 0
    for bits, channels in layout.k_classes:
        with T.serial(channels * per_lane // CODES_PER_CHUNK) as chunk:
            for sub in range(K_LANES // lanes):
                words: list = [None] * bits
                for i in range(CODES_PER_CHUNK):
                    stored = chunk * (CODES_PER_CHUNK // per_lane) + (i // per_lane + first_channel)
                    d = T.bind(order[stored] if mixed else T.cast(stored, "int32"))
                    x = kt[run(d * page + (i % per_lane) * K_LANES + sub * lanes, lanes)]
                    steps = rint((x - splat(low[d], lanes)) * splat(inverse[d], lanes), lanes)
                    steps = T.min(steps, constant(2**bits - 1, lanes))
                    codes = T.reinterpret(f"uint32x{lanes}", T.cast(steps, f"int32x{lanes}"))
                    _pack(words, i, bits, T.bind(codes), lanes)
                for w in range(bits):
                    at = run((chunk * bits + w) * K_LANES + sub * lanes + first_word, lanes)
                    put(pool, words[w], *unit, at)
        first_channel += channels
        first_word += channels * page * bits // 32


def _carry_header(header, carried, layout: KVLayout) -> None:
    """Deal the header's bits out to the tokens: ``carried[P]`` holds the lowest bits of each V scale."""
    page = layout.page_size
    with T.serial(page) as t:
        put(carried, T.uint32(0), t)
    every, rest = divmod(layout.k_header_bits, page)
    for place in range(every + (rest > 0)):
        with T.serial(page if place < every else rest) as t:
            bit = T.shift_left(header[t + place * page], T.uint32(place))
            put(carried, T.bitwise_or(carried[t], bit), t)


def _store_header(pool, unit, header, layout: KVLayout) -> None:
    """Write the header to words of its own."""
    for word in range(layout.unit_words - layout.k_header_offset):
        packed = T.uint32(0)
        for i in range(32 * word, min(32 * word + 32, layout.k_header_bits)):
            packed = T.bind(T.bitwise_or(packed, T.shift_left(header[i], T.uint32(i % 32))))
        put(pool, packed, *unit, layout.k_header_offset + word)


def _seal_values(pool, unit, v, header, layout: KVLayout, lanes: int, red) -> None:
    """Codes and scales of the values ``v[P * D]``; the scales carry the header if they are to."""
    dim, page, bits = layout.head_dim, layout.page_size, layout.v_bits or 0
    half = 2 ** (bits - 1)
    inverse = T.sblock_alloc_buffer((page,), "float32")
    scale_bits = T.sblock_alloc_buffer((page,), "uint32")
    carried = T.sblock_alloc_buffer((page,), "uint32")
    if layout.header_in_v_scales:
        _carry_header(header, carried, layout)
    every, rest = divmod(layout.k_header_bits, page)
    with T.serial(page) as t:
        least = most = v[run(t * dim, lanes)]
        for j in range(1, dim // lanes):
            x = T.bind(v[run(t * dim + j * lanes, lanes)])
            least, most = T.bind(T.min(least, x)), T.bind(T.max(most, x))
        low = T.bind(reduce_lanes(T.min, least, red, lanes))
        high = T.bind(reduce_lanes(T.max, most, red, lanes))
        extreme = T.Select(high > T.float32(0) - low, high, low) + T.float32(0)
        scale = T.cast(extreme * T.float32(-1.0 / half), "float16")
        raw = T.bind(T.cast(T.reinterpret("uint16", scale), "uint32"))
        magnitude = T.max(T.bitwise_and(raw, T.uint32(0x7FFF)), T.uint32(2))
        word = T.bind(T.bitwise_or(magnitude, T.bitwise_and(raw, T.uint32(0x8000))))
        if layout.header_in_v_scales:
            mask = T.Select(t < rest, T.uint32(2 ** (every + 1) - 1), T.uint32(2**every - 1))
            word = T.bind(word + T.bitwise_and(carried[t] - word, mask))
        put(scale_bits, word, t)
        stored = T.reinterpret("float16", T.cast(word, "uint16"))
        put(inverse, T.float32(1) / T.cast(stored, "float32"), t)
    with T.serial(page // 2) as w:
        word = T.bitwise_or(scale_bits[w * 2], T.shift_left(scale_bits[w * 2 + 1], T.uint32(16)))
        put(pool, word, *unit, w + layout.v_scale_offset)
    with T.serial(page // CODES_PER_CHUNK) as chunk, T.serial(dim // lanes) as j:
        words: list = [None] * bits
        for i in range(CODES_PER_CHUNK):
            t = T.bind(chunk * CODES_PER_CHUNK + i)
            x = v[run(t * dim + j * lanes, lanes)]
            steps = rint(x * splat(inverse[t], lanes), lanes) + constant(half, lanes)
            steps = T.max(T.min(steps, constant(2**bits - 1, lanes)), constant(0, lanes))
            codes = T.reinterpret(f"uint32x{lanes}", T.cast(steps, f"int32x{lanes}"))
            _pack(words, i, bits, T.bind(codes), lanes)
        for w in range(bits):
            put(pool, words[w], *unit, run((chunk * bits + w) * dim + j * lanes + layout.v_offset, lanes))


def _copy_raw(pool, unit, source, start, offset: int, layout: KVLayout, isa: CpuIsa) -> None:
    """Copy an unquantized component of a row page, as it is."""
    values = isa.lanes
    words = values * (2 if layout.row_dtype == "float16" else 4) // 4
    with T.serial(layout.values_per_unit // values) as j:
        row = source[(*start, run(j * values, values))]
        put(pool, T.reinterpret(f"uint32x{words}", row), *unit, run(j * words + offset, words))


def kv_seal(layout: KVLayout, num_heads: int, isa: CpuIsa) -> tirx.PrimFunc:
    """Build the kernel.

    Arguments of the kernel: :func:`kvq.schedules.cache_arguments.seal_arguments`.
    """
    kv_heads = layout.num_kv_heads
    classes = KeyWidths(layout, num_heads)
    k_lanes = isa.lanes
    v_lanes = vector_lanes(layout.head_dim, isa.lanes)

    def seal_head(task, q, kv_open, kv_workspace, num_open, tasks, layer, pool):
        head = T.bind(T.truncmod(task, T.int32(kv_heads)))
        at = T.bind(T.truncdiv(task, T.int32(kv_heads)))
        source = T.bind(T.cast(tasks[at, 0], "int64"))
        unit = (T.bind(T.cast(tasks[at, 1], "int64")), layer, head)
        red = T.sblock_alloc_buffer((isa.lanes,), "float32")
        x = T.sblock_alloc_buffer((layout.values_per_unit,), "float32")

        def load(part: int, offset: int) -> None:
            """Component ``part`` of the row page: to ``x`` if it will be quantized, else to the pool."""
            bits = layout.v_bits if part else layout.k_bits

            def one(rows, start):
                if bits is None:
                    _copy_raw(pool, unit, rows, (*start, part), offset, layout, isa)
                else:
                    row_page_to_float(x, rows, (*start, part), layout.values_per_unit, isa.lanes)

            with T.If(source < num_open):
                with T.Then():
                    one(kv_open, (source, layer, head))
                with T.Else():
                    one(kv_workspace, (source - num_open, head))

        header = T.sblock_alloc_buffer((max(1, layout.k_header_bits),), "uint32")
        load(0, 0)
        if layout.k_bits is not None:
            queries = (q, T.bind(T.cast(tasks[at, 2], "int64")), head)
            _seal_keys(pool, unit, x, classes, queries, header, layout, k_lanes, red)
            if not layout.header_in_v_scales:
                _store_header(pool, unit, header, layout)
        load(1, layout.v_offset)
        if layout.v_bits is not None:
            _seal_values(pool, unit, x, header, layout, v_lanes, red)

    with IRBuilder() as script, builder.prim_func(is_private=True, s_tir=True):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        a = seal_arguments(layout, num_heads)
        count = a.counts[0] * kv_heads
        with T.If(a.counts[0] > 0), T.Then(), T.parallel(count) as task, T.sblock("seal"):
            index = T.axis.spatial(count, task)
            T.reads()
            T.writes()
            seal_head(index, a.q, a.kv_open, a.workspace, a.num_open, a.tasks, a.layer, a.pool)
    return script.get()
