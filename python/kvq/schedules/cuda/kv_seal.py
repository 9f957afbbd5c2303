"""kv_seal: what happens to a row page when its tokens are all there.

A block has one page of one head. It writes the words of :func:`kvq.quantization.kv_codec.seal_unit`, bit for
bit, codes in the order of :mod:`kvq.quantization.fragments`. Rows are gone through in the order in which they
lie, once for their ranges and once for their codes; codes wait in shared memory, a byte each, for the words.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.layout import SCALE_MIN_EXPONENT, KVLayout
from kvq.quantization.kv_codec import EXPONENT_OFFSET
from kvq.schedules.cache_arguments import seal_arguments
from kvq.schedules.statements import for_threads, put, when

from . import page_codes
from .block import (
    WARP,
    kernel_attributes,
    let_next_start,
    positive_zero,
    reduce_block,
    reduce_warp,
    sync,
    wait_for_rows,
)
from .fragments import Codes
from .key_widths import KeyWidths
from .mma import load_global

THREADS = 256
#: Values of a row that a thread reads at once.
VECTOR = 4
#: Values of K (or V) in a page that is copied to shared memory.
STAGED_VALUES = 8192


def _pack_codes(layout: KVLayout, kind: Codes, place, thread, row, code, stored, write, codes) -> None:
    """Emit ``write(index, word)`` for the codes ``code(token, channel, value)`` of the rows ``row(i)``.

    ``stored(channel)`` is where a channel stands among the codes. ``codes`` is shared, uint8 ``[P * (D +
    1)]``: the byte after each row lets the lanes of a warp, whose words lie eight tokens apart, read from
    different banks.
    """
    dim, page = layout.head_dim, layout.page_size

    def vector(i):
        token, first = T.bind(T.truncdiv(i * VECTOR, dim)), T.bind(T.truncmod(i * VECTOR, dim))
        values = [row(i * VECTOR + j) for j in range(VECTOR)]
        for j, value in enumerate(values):
            made = code(token, first + j, T.cast(value, "float32"))
            put(codes, T.cast(made, "uint8"), token * (dim + 1) + stored(first + j))

    def read(token, channel):
        return T.cast(codes[token * (dim + 1) + channel], "uint32")

    for_threads(page * dim // VECTOR, thread, THREADS, vector)
    sync()
    page_codes.for_words(kind, dim, place, thread, THREADS, read, write)
    sync()


def _half_bits(value):
    """The bits of a float32 as fp16, as uint32."""
    return T.cast(T.reinterpret("uint16", T.cast(value, "float16")), "uint32")


def _raw_words(layout: KVLayout, is_value: bool, thread, row, write) -> None:
    """An unquantized component: fp16 rows in the order of fragments, float32 rows as they are."""
    if layout.row_dtype == "float16":

        def read(token, channel):
            value = row(token * layout.head_dim + channel)
            return T.cast(T.reinterpret("uint16", value), "uint32")

        kind, place = (
            (Codes.values(layout), page_codes.value) if is_value else (Codes.keys(layout), page_codes.key_row)
        )
        page_codes.for_words(kind, layout.head_dim, place, thread, THREADS, read, write)
    else:
        for_threads(
            layout.values_per_unit,
            thread,
            THREADS,
            lambda i: write(i, T.reinterpret("uint32", row(i))),
        )


def _token_parts(dim: int) -> int:
    """Parts of a page's tokens whose ranges are measured side by side."""
    return next(parts for parts in (4, 2, 1) if parts * dim <= THREADS or parts == 1)


def _seal_keys(layout: KVLayout, widths: KeyWidths, queries, thread, row, write, shared, codes):
    """Codes, scales and minimums of the keys ``row(i)``, ``[P, D]``; returns the base (int32)."""
    dim, page = layout.head_dim, layout.page_size
    low, spread, inverse, log_code, red = shared
    parts = _token_parts(dim)
    ranges = T.alloc_shared((2, parts, dim), "float32")
    most_code = T.alloc_local((1,), "int32")
    put(most_code, T.int32(0), 0)

    def measure_part(i):
        part, d = T.bind(T.truncdiv(i, dim)), T.bind(T.truncmod(i, dim))
        start = T.bind(part * (page // parts) * dim + d)
        reach = T.alloc_local((2,), "float32")
        for bound in range(2):
            put(reach, T.cast(row(start), "float32"), bound)
        with T.serial(page // parts // 8) as step:
            values = [T.bind(T.cast(row(start + (step * 8 + t) * dim), "float32")) for t in range(8)]
            for value in values:
                put(reach, T.min(reach[0], value), 0)
                put(reach, T.max(reach[1], value), 1)
        for bound in range(2):
            put(ranges, reach[bound], bound, part, d)

    def measure(d):
        least, most = ranges[0, 0, d], ranges[1, 0, d]
        for part in range(1, parts):
            least, most = T.min(least, ranges[0, part, d]), T.max(most, ranges[1, part, d])
        minimum = T.bind(positive_zero(least))
        put(low, minimum, d)
        put(spread, most - minimum, d)

    def scale_code(d):
        need = T.bind(spread[d] / T.cast(widths.levels(d), "float32"))
        code = T.bind(T.shift_right(T.reinterpret("int32", need) + T.int32(0x7FFFF), T.int32(19)))
        put(log_code, code, d)
        put(most_code, T.max(most_code[0], code), 0)

    for_threads(parts * dim, thread, THREADS, measure_part)
    sync()
    for_threads(dim, thread, THREADS, measure)
    sync()
    widths.choose(*queries, spread)
    for_threads(dim, thread, THREADS, scale_code)
    top = reduce_block(T.max, most_code[0], thread, THREADS, red)
    top = T.max(T.shift_right(top, T.int32(4)), T.int32(127 + SCALE_MIN_EXPONENT))
    base = T.bind(top - T.int32(15 + EXPONENT_OFFSET))
    origin = T.bind((base + T.int32(EXPONENT_OFFSET)) * T.int32(16))

    def scale(d):
        code = T.bind(T.max(log_code[d] - origin, T.int32(0)))
        put(log_code, code, d)
        stored = T.reinterpret("float32", T.shift_left(code + origin, T.int32(19)))
        put(inverse, T.float32(1) / stored, d)

    for_threads(dim, thread, THREADS, scale)
    sync()

    def scale_word(w):
        word = T.cast(log_code[w * 4], "uint32")
        for i in range(1, 4):
            word = T.bitwise_or(word, T.shift_left(T.cast(log_code[w * 4 + i], "uint32"), T.uint32(8 * i)))
        write(w + layout.k_scale_offset, word)

    def minimum_word(w):
        halves = [_half_bits(low[w * 2 + i]) for i in range(2)]
        word = T.bitwise_or(halves[0], T.shift_left(halves[1], T.uint32(16)))
        write(w + layout.k_min_offset, word)

    def code(_token, channel, value):
        steps = T.nearbyint((value - low[channel]) * inverse[channel])
        return T.cast(T.min(steps, T.cast(widths.levels(channel), "float32")), "uint32")

    for_threads(dim // 4, thread, THREADS, scale_word)
    for_threads(dim // 2, thread, THREADS, minimum_word)
    _pack_codes(
        layout, Codes.keys(layout), page_codes.key_code, thread, row, code, widths.stored, write, codes
    )
    return base


def _seal_values(layout: KVLayout, thread, row, header, write, inverse, scale_bits, codes) -> None:
    """Codes and scales of the values ``row(i)``, ``[P, D]``; the scales carry the header ``header(i)``."""
    dim, page, bits = layout.head_dim, layout.page_size, layout.v_bits or 0
    half = 2 ** (bits - 1)
    lane, warp = T.bind(T.bitwise_and(thread, WARP - 1)), T.bind(T.shift_right(thread, 5))

    def value(token, channel):
        return T.cast(row(token * dim + channel), "float32")

    def measure(token):
        reach = T.alloc_local((2,), "float32")
        first = T.bind(value(token, T.min(lane, dim - 1)))
        put(reach, first, 0)
        put(reach, first, 1)
        with T.serial(-(-dim // WARP) - 1) as e:
            number = T.bind(value(token, T.min(lane + (e + 1) * WARP, dim - 1)))
            put(reach, T.min(reach[0], number), 0)
            put(reach, T.max(reach[1], number), 1)
        low, high = reduce_warp(T.min, reach[0]), reduce_warp(T.max, reach[1])
        extreme = T.bind(positive_zero(T.Select(high > T.float32(0) - low, high, low)))
        raw = T.bind(_half_bits(extreme * T.float32(-1.0 / half)))
        magnitude = T.max(T.bitwise_and(raw, T.uint32(0x7FFF)), T.uint32(2))
        word = T.bind(T.bitwise_or(magnitude, T.bitwise_and(raw, T.uint32(0x8000))))
        if layout.header_in_v_scales:
            every, rest = divmod(layout.k_header_bits, page)
            carried = T.uint32(0)
            for place in range(every + (rest > 0)):
                index = place * page + token
                bit = header(index if place < every else T.min(index, layout.k_header_bits - 1))
                carried = T.bitwise_or(carried, T.shift_left(bit, T.uint32(place)))
            mask = T.Select(token < rest, T.uint32(2 ** (every + 1) - 1), T.uint32(2**every - 1))
            word = T.bind(word + T.bitwise_and(carried - word, mask))
        stored = T.reinterpret("float16", T.cast(word, "uint16"))

        def keep():
            put(scale_bits, word, token)
            put(inverse, T.float32(1) / T.cast(stored, "float32"), token)

        when(lane == 0, keep)

    with T.unroll(page // (THREADS // WARP)) as step:
        measure(T.bind(step * (THREADS // WARP) + warp))
    sync()

    def scale_word(w):
        word = T.bitwise_or(scale_bits[w * 2], T.shift_left(scale_bits[w * 2 + 1], T.uint32(16)))
        write(w + layout.v_scale_offset, word)

    def code(token, _channel, number):
        steps = T.nearbyint(number * inverse[token]) + T.float32(half)
        return T.cast(T.max(T.min(steps, T.float32(2**bits - 1)), T.float32(0)), "uint32")

    def write_code(index, word):
        write(index + layout.v_offset, word)

    def stored(channel):
        return channel

    for_threads(page // 2, thread, THREADS, scale_word)
    _pack_codes(layout, Codes.values(layout), page_codes.value, thread, row, code, stored, write_code, codes)


def _header_word(layout: KVLayout, header, w):
    """Word ``w`` of a header that has words of its own; zeros fill the last ones."""
    packed, last = T.uint32(0), layout.k_header_bits - 1
    for bit in range(32):
        index = w * 32 + bit
        one = T.Select(index <= last, header(T.min(index, last)), T.uint32(0))
        packed = T.bitwise_or(packed, T.shift_left(one, T.uint32(bit)))
    return packed


def _rows(layout: KVLayout, thread, source, kv_open, kv_workspace, num_open, layer, head):
    """``row(part)(i)``: numbers of the row page ``source``, which is open or in the workspace.

    A page that fits shared memory beside its codes is copied there, all of its loads in flight at once.
    """
    unit, lanes = layout.values_per_unit, 8

    def direct(part):
        def number(i):
            opened = kv_open[T.min(source, num_open - 1), layer, head, part, i]
            return T.if_then_else(source < num_open, opened, kv_workspace[source - num_open, head, part, i])

        return number

    if unit > STAGED_VALUES or layout.row_dtype != "float16":
        return direct
    staged = T.alloc_shared((2, unit), "float16", align=128)

    def copy(rows, start):
        for part in range(2):

            def vector(i, part=part):
                at = T.ramp(i * lanes, 1, lanes)
                put(staged, rows[(*start, part, at)], part, at)

            for_threads(unit // lanes, thread, THREADS, vector)

    with T.If(source < num_open):
        with T.Then():
            copy(kv_open, (source, layer, head))
        with T.Else():
            # The difference is int32, which TVM does not multiply out: of one layer, ``num_open`` times a
            # unit is the size of ``kv_open`` as well, hence would become an argument, and of an argument TVM
            # does not know that vectors divide it.
            page = T.cast(T.cast(source, "int32") - T.cast(num_open, "int32"), "int64")
            copy(kv_workspace, (page, head))
    sync()
    return lambda part: lambda i: staged[part, i]


def kv_seal(layout: KVLayout, num_heads: int, overlap: bool = False) -> tirx.PrimFunc:
    """Build the kernel; with ``overlap`` it starts while the one before it runs.

    Arguments of the kernel: :func:`kvq.schedules.cache_arguments.seal_arguments`. One block for each entry of
    the list and head; those beyond the count have nothing to do.
    """
    dim, page = layout.head_dim, layout.page_size

    def seal(task, head, thread, q, kv_open, kv_workspace, num_open, tasks, layer, pool):
        source = T.bind(T.cast(tasks[task, 0], "int64"))
        target = T.bind(T.cast(tasks[task, 1], "int64"))
        low, spread, inverse = (T.alloc_shared((dim,), "float32") for _ in range(3))
        log_code = T.alloc_shared((dim,), "int32")
        red = T.alloc_shared((THREADS // WARP,), "int32")
        v_inverse = T.alloc_shared((page,), "float32")
        v_bits = T.alloc_shared((page,), "uint32")

        def write(index, word):
            put(pool, word, target, layer, head, index)

        def write_value(index, word):
            write(index + layout.v_offset, word)

        row = _rows(layout, thread, source, kv_open, kv_workspace, num_open, layer, head)
        quantized = layout.k_bits is not None or layout.v_bits is not None
        codes = T.alloc_shared((page * (dim + 1) if quantized else 1,), "uint8")
        base = None
        widths = KeyWidths(layout, num_heads, thread, THREADS)
        if layout.k_bits is None:
            _raw_words(layout, False, thread, row(0), write)
        else:
            queries = (q, T.bind(T.cast(tasks[task, 2], "int64")), head)
            shared = (low, spread, inverse, log_code, red)
            base = _seal_keys(layout, widths, queries, thread, row(0), write, shared, codes)

        def header(i):
            return widths.header(i, base)

        if layout.v_bits is None:
            _raw_words(layout, True, thread, row(1), write_value)
        else:
            _seal_values(layout, thread, row(1), header, write, v_inverse, v_bits, codes)
        own_words = layout.unit_words - layout.k_header_offset
        if own_words:
            for_threads(
                own_words,
                thread,
                THREADS,
                lambda w: write(layout.k_header_offset + w, _header_word(layout, header, w)),
            )

    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(kernel_attributes(overlap))
        a = seal_arguments(layout, num_heads)
        T.device_entry()
        head, task = T.cta_id([layout.num_kv_heads, T.cast(a.num_tasks, "int32")])
        thread = T.thread_id([THREADS])
        let_next_start(overlap)
        # of the plan, which nothing in the step writes; in most steps there is nothing to do
        count = T.alloc_local((1,), "int32")
        load_global(count, 0, 1, a.counts.ptr_to([0]), kind="s32")
        # also where nothing is to be done: who waits for this kernel waits for those before it
        wait_for_rows(overlap)
        with T.If(task < count[0]), T.Then():
            seal(task, head, thread, a.q, a.kv_open, a.workspace, a.num_open, a.tasks, a.layer, a.pool)
    return script.get()
