"""paged_attention: online softmax over sealed pages and the query's own row page.

One task of the parallel loop is (attention task, KV head): at most ``TILE_ROWS`` rows of one sequence,
all in one page of positions, with their whole group of query heads. For each page, the codes become
float32 once, K as ``[D, P]`` and V as ``[P, D]``, in two buffers that fit the first or second cache level;
then every row runs the same inner loops over them, scores with tokens in lanes, values with channels
in lanes. Decode is a tile of one row, so decode and prefill are the same machine code and a row's
result cannot depend on what shares its tile.

The keys of a row are cut into splits of ``SPLIT_PAGES`` pages. Each split starts from nothing and is
merged into the row's total in order, whether one task walked through all of them or several tasks left
their partial results in ``attention_scratch`` for the merge at the end: the same bits either way.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from kvq.layout import BASE_BITS, CODES_PER_CHUNK, K_LANES, KVLayout
from kvq.quantization.kv_codec import EXPONENT_OFFSET

from .row_ops import hadamard_inplace, vector_lanes
from .vector import (
    MASKED,
    CpuIsa,
    code_to_float,
    constant,
    exp,
    extract_code,
    fma,
    half_to_float,
    prefetch,
    put,
    reduce_lanes,
    row_page_to_float,
    run,
    splat,
)

#: Most rows of an attention task.
TILE_ROWS = 16
#: Key pages of a split.
SPLIT_PAGES = 4
#: Floats of a scratch slot beyond the head_dim: the maximum and the sum.
SCRATCH_EXTRA = 8


class _Kernel:
    """The statements of the kernel, with its static geometry at hand."""

    def __init__(self, layout: KVLayout, num_heads: int, dtype: str, isa: CpuIsa) -> None:
        self.layout, self.num_heads, self.dtype, self.isa = layout, num_heads, dtype, isa
        self.group = num_heads // layout.num_kv_heads
        self.dim, self.page = layout.head_dim, layout.page_size
        self.lanes = isa.lanes
        self.d_lanes = vector_lanes(self.dim, isa.lanes)
        registers = 32 if isa.lanes == 16 else 16
        #: heads that run together, and the accumulators each of them then has
        self.block = 3 if self.group % 3 == 0 else min(self.group, 2)
        self.width = max(1, (registers - 4) // self.block)

    def width_for(self, vectors: int) -> int:
        """The largest divisor of ``vectors`` that fits the accumulators of one head."""
        return next(w for w in range(min(self.width, vectors), 0, -1) if vectors % w == 0)

    # ---- one page to float32 ------------------------------------------------------------------
    def load_sealed(self, pool, unit, kt, v) -> None:
        """Dequantize a sealed page into ``kt[D * P]`` and ``v[P * D]``."""
        layout = self.layout
        if layout.k_bits is None:
            self._load_raw(pool, unit, 0, kt)
        else:
            self._load_keys(pool, unit, kt)
        if layout.v_bits is None:
            self._load_raw(pool, unit, layout.v_offset, v)
        else:
            self._load_values(pool, unit, v)

    def _load_raw(self, pool, unit, offset: int, out) -> None:
        lanes = self.lanes
        words = lanes * (2 if self.layout.row_dtype == "float16" else 4) // 4
        with T.serial(self.layout.values_per_unit // lanes) as j:
            row = T.bind(pool[(*unit, run(j * words + offset, words))])
            value = T.reinterpret(f"float32x{lanes}", row) if words == lanes else half_to_float(row, lanes)
            put(out, value, run(j * lanes, lanes))

    def _load_keys(self, pool, unit, kt) -> None:
        layout, dim, lanes = self.layout, self.dim, self.lanes
        bits, per_lane = layout.k_bits or 0, self.page // K_LANES
        scale = T.sblock_alloc_buffer((dim,), "float32")
        minimum = T.sblock_alloc_buffer((dim,), "float32")
        if layout.base_in_v_scales:
            base = T.int32(0)
            for i in range(BASE_BITS):
                word = pool[(*unit, layout.v_scale_offset + i // 2)]
                bit = T.bitwise_and(T.shift_right(word, T.uint32(16 * (i % 2))), T.uint32(1))
                base = T.bitwise_or(base, T.shift_left(T.cast(bit, "int32"), T.int32(i)))
        else:
            base = T.cast(pool[(*unit, layout.k_base_offset)], "int32")
        origin = T.bind((base + T.int32(EXPONENT_OFFSET)) * T.int32(16))
        with T.serial(dim // 8) as j:
            code = T.reinterpret("uint8x8", pool[(*unit, run(j * 2 + layout.k_scale_offset, 2))])
            log_code = T.cast(code, "int32x8") + splat(origin, 8)
            put(
                scale,
                T.reinterpret("float32x8", T.shift_left(log_code, splat(T.int32(19), 8))),
                run(j * 8, 8),
            )
            put(minimum, half_to_float(pool[(*unit, run(j * 4 + layout.k_min_offset, 4))], 8), run(j * 8, 8))
        with T.serial(dim * per_lane // CODES_PER_CHUNK) as chunk:
            for sub in range(K_LANES // lanes):
                words = [
                    T.bind(pool[(*unit, run((chunk * bits + w) * K_LANES + sub * lanes, lanes))])
                    for w in range(bits)
                ]
                for i in range(CODES_PER_CHUNK):
                    if i % per_lane == 0:
                        d = chunk * (CODES_PER_CHUNK // per_lane) + i // per_lane
                        factor = T.bind(splat(scale[d], lanes))
                        offset = T.bind(splat(minimum[d], lanes))
                    code = code_to_float(extract_code(words.__getitem__, i, bits, lanes), lanes)
                    at = d * self.page + (i % per_lane) * K_LANES + sub * lanes
                    put(kt, fma(code, factor, offset, lanes), run(at, lanes))

    def _load_values(self, pool, unit, v) -> None:
        layout, dim, lanes = self.layout, self.dim, self.d_lanes
        bits = layout.v_bits or 0
        scale = T.sblock_alloc_buffer((self.page,), "float32")
        offset = T.sblock_alloc_buffer((self.page,), "float32")
        half = float(2 ** (bits - 1))
        with T.serial(self.page // 8) as j:
            at = run(j * 8, 8)
            put(scale, half_to_float(pool[(*unit, run(j * 4 + layout.v_scale_offset, 4))], 8), at)
            put(offset, scale[at] * constant(-half, 8), at)
        with T.serial(self.page // CODES_PER_CHUNK) as chunk, T.serial(dim // lanes) as j:
            words = [
                T.bind(pool[(*unit, run((chunk * bits + w) * dim + j * lanes + layout.v_offset, lanes))])
                for w in range(bits)
            ]
            for i in range(CODES_PER_CHUNK):
                t = chunk * CODES_PER_CHUNK + i
                code = code_to_float(extract_code(words.__getitem__, i, bits, lanes), lanes)
                value = fma(code, splat(scale[t], lanes), splat(offset[t], lanes), lanes)
                put(v, value, run(t * dim + j * lanes, lanes))

    def load_own(self, kv_open, kv_workspace, num_open, at, layer, head, kt, v) -> None:
        """Read the row page ``at`` into ``kt`` and ``v``."""
        for part, out in ((0, kt), (1, v)):
            with T.If(at < num_open):
                with T.Then():
                    start = (at, layer, head, part)
                    row_page_to_float(out, kv_open, start, self.layout.values_per_unit, self.lanes)
                with T.Else():
                    start = (at - num_open, head, part)
                    row_page_to_float(out, kv_workspace, start, self.layout.values_per_unit, self.lanes)

    # ---- one row of one page ------------------------------------------------------------------
    def attend(self, q, row, first_head, local, heads: int, kt, v, valid, scores, red, state) -> None:
        """Add one page's keys to the split state of ``heads`` heads of one row.

        ``local`` is the first of the heads within the state; the first ``valid`` tokens count.
        """
        peak, sums, acc_out = state
        lanes, page = self.lanes, self.page
        vectors = page // lanes
        width = self.width_for(vectors)
        for block in range(vectors // width):
            acc = T.sblock_alloc_buffer((heads, width, lanes), "float32")
            for r in range(heads):
                for j in range(width):
                    put(acc, constant(0, lanes), r, j, run(0, lanes))
            with T.serial(self.dim) as d:
                query = [T.bind(splat(q[row, first_head + r, d], lanes)) for r in range(heads)]
                for j in range(width):
                    key = T.bind(kt[run(d * page + (block * width + j) * lanes, lanes)])
                    for r in range(heads):
                        put(acc, fma(query[r], key, acc[r, j, run(0, lanes)], lanes), r, j, run(0, lanes))
            for r in range(heads):
                for j in range(width):
                    at = (block * width + j) * lanes
                    masked = T.Select(
                        T.ramp(T.int32(at), 1, lanes) < splat(valid, lanes),
                        acc[r, j, run(0, lanes)],
                        constant(MASKED, lanes),
                    )
                    put(scores, masked, r, run(at, lanes))
        for r in range(heads):
            most = scores[r, run(0, lanes)]
            for j in range(1, vectors):
                most = T.bind(T.max(most, scores[r, run(j * lanes, lanes)]))
            before = T.bind(peak[local + r])
            now = T.bind(T.max(before, reduce_lanes(T.max, most, red, lanes)))
            put(peak, now, local + r)
            total = None
            for j in range(vectors):
                at = run(j * lanes, lanes)
                weight = exp(scores[r, at] - splat(now, lanes), lanes)
                in_page = T.ramp(T.int32(j * lanes), 1, lanes) < splat(valid, lanes)
                weight = T.bind(T.Select(in_page, weight, constant(0, lanes)))
                put(scores, weight, r, at)
                total = weight if total is None else T.bind(total + weight)
            fade = T.bind(exp(splat(before - now, lanes), lanes))
            put(sums, fma(sums[local + r, run(0, lanes)], fade, total, lanes), local + r, run(0, lanes))
            self._scale_row(acc_out, local + r, before - now)
        lanes, vectors = self.d_lanes, self.dim // self.d_lanes
        width = self.width_for(vectors)
        with T.serial(vectors // width) as block:
            acc = T.sblock_alloc_buffer((heads, width, lanes), "float32")
            for r in range(heads):
                for j in range(width):
                    put(acc, acc_out[local + r, run((block * width + j) * lanes, lanes)], r, j, run(0, lanes))
            with T.serial(valid) as t:
                weight = [T.bind(splat(scores[r, t], lanes)) for r in range(heads)]
                for j in range(width):
                    value = T.bind(v[run(t * self.dim + (block * width + j) * lanes, lanes)])
                    for r in range(heads):
                        put(acc, fma(weight[r], value, acc[r, j, run(0, lanes)], lanes), r, j, run(0, lanes))
            for r in range(heads):
                for j in range(width):
                    put(acc_out, acc[r, j, run(0, lanes)], local + r, run((block * width + j) * lanes, lanes))

    def _scale_row(self, o, index, log_factor) -> None:
        lanes = self.d_lanes
        factor = T.bind(exp(splat(log_factor, lanes), lanes))
        with T.serial(self.dim // lanes) as j:
            put(o, o[index, run(j * lanes, lanes)] * factor, index, run(j * lanes, lanes))

    def attend_group(self, q, row, head, local, kt, v, valid, scores, red, state) -> None:
        """All query heads of the KV head ``head``, a block at a time."""
        group, block = self.group, self.block
        with T.serial(group // block) as b:
            first = T.bind(head * group + b * block)
            self.attend(q, row, first, local + b * block, block, kt, v, valid, scores, red, state)
        rest = group % block
        if rest:
            done = group - rest
            self.attend(q, row, head * group + done, local + done, rest, kt, v, valid, scores, red, state)

    # ---- splits --------------------------------------------------------------------------------
    def merge(self, total, index, peak, added, source, source_index) -> None:
        """Merge a split into ``total[index]``: its maximum, its sum, and ``source[source_index, D]``."""
        total_m, total_l, total_o = total
        lanes = self.d_lanes
        now = T.bind(T.max(total_m[index], peak))
        fade = T.bind(exp(splat(total_m[index] - now, lanes), lanes))
        gain = T.bind(exp(splat(peak - now, lanes), lanes))
        put(total_m, now, index)
        old = total_l[index, run(0, lanes)]
        put(total_l, fma(splat(added, lanes), gain, old * fade, lanes), index, run(0, lanes))
        with T.serial(self.dim // lanes) as j:
            at = run(j * lanes, lanes)
            faded = total_o[index, at] * fade
            put(total_o, fma(source[(*source_index, at)], gain, faded, lanes), index, at)

    def clear(self, state, index, sum_lanes: int) -> None:
        """Start the state at ``index`` from nothing."""
        peak, sums, acc_out = state
        put(peak, T.float32(MASKED), index)
        put(sums, constant(0, sum_lanes), index, run(0, sum_lanes))
        with T.serial(self.dim // self.d_lanes) as j:
            put(acc_out, constant(0, self.d_lanes), index, run(j * self.d_lanes, self.d_lanes))

    def finish(self, total, index, out, row, head, x, t) -> None:
        """Divide by the sum, undo the rotation of V and write ``out[row, head]``."""
        _, total_l, total_o = total
        lanes = self.d_lanes
        with T.serial(self.dim // lanes) as j:
            at = run(j * lanes, lanes)
            put(x, total_o[index, at] / total_l[index, run(0, lanes)], at)
        if self.layout.v_bits is not None:
            hadamard_inplace(x, t, self.dim)
        with T.serial(self.dim // lanes) as j:
            at = run(j * lanes, lanes)
            put(out, T.cast(x[at], f"{self.dtype}x{lanes}"), row, head, at)

    def task(self, item, args) -> None:
        """One attention task of one KV head."""
        q, pool, kv_open, kv_workspace, num_open, positions, table, tasks, layer, scratch, out = args
        layout, group, lanes = self.layout, self.group, self.lanes
        states = TILE_ROWS * group
        at = T.bind(T.truncdiv(item, T.int32(layout.num_kv_heads)))
        head = T.bind(T.truncmod(item, T.int32(layout.num_kv_heads)))
        first_row, num_rows = T.bind(tasks[at, 0]), T.bind(tasks[at, 1] - tasks[at, 0])
        own_page = T.bind(T.shift_right(positions[first_row], T.int32(self.page.bit_length() - 1)))
        own = T.bind(T.cast(tasks[at, 3], "int64"))
        kt = T.sblock_alloc_buffer((layout.values_per_unit,), "float32")
        v = T.sblock_alloc_buffer((layout.values_per_unit,), "float32")
        scores = T.sblock_alloc_buffer((self.block, self.page), "float32")
        red = T.sblock_alloc_buffer((lanes,), "float32")
        x = T.sblock_alloc_buffer((self.dim,), "float32")
        t = T.sblock_alloc_buffer((self.dim,), "float32")
        split = tuple(
            T.sblock_alloc_buffer(shape, "float32")
            for shape in ((states,), (states, lanes), (states, self.dim))
        )
        total = tuple(
            T.sblock_alloc_buffer(shape, "float32")
            for shape in ((states,), (states, self.d_lanes), (states, self.dim))
        )
        with T.serial(num_rows * group) as i:
            self.clear(total, i, self.d_lanes)
        with T.serial(tasks[at, 5] - tasks[at, 4]) as s:
            number = T.bind(tasks[at, 4] + s)
            with T.serial(num_rows * group) as i:
                self.clear(split, i, lanes)
            pages = T.bind(T.min(own_page + 1 - number * SPLIT_PAGES, SPLIT_PAGES))
            with T.serial(pages) as p:
                j = T.bind(number * SPLIT_PAGES + p)
                with T.If(j == own_page):
                    with T.Then():
                        self.load_own(kv_open, kv_workspace, num_open, own, layer, head, kt, v)
                    with T.Else():
                        here, after = j, T.min(j + 1, own_page - 1)
                        page, following = (
                            T.bind(T.cast(table[tasks[at, 2] + i], "int64")) for i in (here, after)
                        )
                        prefetch(pool, (following, layer, head), layout.unit_words)
                        self.load_sealed(pool, (page, layer, head), kt, v)
                with T.serial(num_rows) as i:
                    row = T.bind(first_row + i)
                    seen = T.bitwise_and(positions[row], T.int32(self.page - 1)) + 1
                    valid = T.bind(T.Select(j == own_page, seen, T.int32(self.page)))
                    self.attend_group(q, row, head, i * group, kt, v, valid, scores, red, split)
            with T.serial(num_rows * group) as i:
                peak, sums, acc_out = split
                add = T.bind(reduce_lanes(lambda a, b: a + b, sums[i, run(0, lanes)], red, lanes))
                slot = T.bind(tasks[at, 6])
                with T.If(slot < 0):
                    with T.Then():
                        self.merge(total, i, peak[i], add, acc_out, (i,))
                    with T.Else():
                        where = (T.bind(T.cast(slot + s, "int64")), head * group + i)
                        put(scratch, peak[i], *where, self.dim)
                        put(scratch, add, *where, self.dim + 1)
                        with T.serial(self.dim // self.d_lanes) as e:
                            part = run(e * self.d_lanes, self.d_lanes)
                            put(scratch, acc_out[i, part], *where, part)
        with T.If(tasks[at, 6] < 0), T.Then(), T.serial(num_rows) as i, T.serial(group) as r:
            self.finish(total, i * group + r, out, first_row + i, head * group + r, x, t)

    def merge_task(self, item, scratch, merges, out) -> None:
        """Merge the scratch slots of one row and query head, in order of splits."""
        at = T.bind(T.truncdiv(item, T.int32(self.num_heads)))
        head = T.bind(T.truncmod(item, T.int32(self.num_heads)))
        x = T.sblock_alloc_buffer((self.dim,), "float32")
        t = T.sblock_alloc_buffer((self.dim,), "float32")
        total = tuple(
            T.sblock_alloc_buffer(shape, "float32") for shape in ((1,), (1, self.d_lanes), (1, self.dim))
        )
        self.clear(total, 0, self.d_lanes)
        with T.serial(merges[at, 2]) as s:
            slot = T.bind(T.cast(merges[at, 1] + s, "int64"))
            peak, added = (T.bind(scratch[slot, head, self.dim + i]) for i in range(2))
            self.merge(total, 0, peak, added, scratch, (slot, head))
        self.finish(total, 0, out, merges[at, 0], head, x, t)


def paged_attention(layout: KVLayout, num_heads: int, dtype: str, isa: CpuIsa) -> tirx.PrimFunc:
    """Build the kernel.

    Arguments of the kernel: q ``float32[n, Hq, D]`` (rotated, scaled), kv_pool, kv_workspace, positions,
    page_table, plan_counts, attention_tasks, merge_tasks, layer, kv_open, attention_scratch (written in
    place) and out ``dtype[n, Hq, D]``.
    """
    kernel = _Kernel(layout, num_heads, dtype, isa)
    dim, layers, kv_heads, unit = (
        layout.head_dim,
        layout.num_layers,
        layout.num_kv_heads,
        layout.values_per_unit,
    )
    row_dtype, unit_words = layout.row_dtype, layout.unit_words

    @T.prim_func(s_tir=True, private=True)
    def paged_attention(
        q_h: T.handle,
        pool_h: T.handle,
        workspace_h: T.handle,
        positions_h: T.handle,
        table_h: T.handle,
        counts: T.Buffer((4,), "int32"),
        tasks_h: T.handle,
        merges_h: T.handle,
        layer: T.int64,
        open_h: T.handle,
        scratch_h: T.handle,
        out_h: T.handle,
    ):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        n = T.int64()
        num_pages = T.int64()
        num_open = T.int64()
        num_workspace = T.int64()
        table_size = T.int64()
        num_tasks = T.int64()
        num_merges = T.int64()
        num_slots = T.int64()
        q = T.match_buffer(q_h, (n, num_heads, dim), "float32")
        pool = T.match_buffer(pool_h, (num_pages, layers, kv_heads, unit_words), "uint32")
        kv_open = T.match_buffer(open_h, (num_open, layers, kv_heads, 2, unit), row_dtype)
        kv_workspace = T.match_buffer(workspace_h, (num_workspace, kv_heads, 2, unit), row_dtype)
        positions = T.match_buffer(positions_h, (n,), "int32")
        table = T.match_buffer(table_h, (table_size,), "int32")
        tasks = T.match_buffer(tasks_h, (num_tasks, 7), "int32")
        merges = T.match_buffer(merges_h, (num_merges, 3), "int32")
        scratch = T.match_buffer(scratch_h, (num_slots, num_heads, dim + SCRATCH_EXTRA), "float32")
        out = T.match_buffer(out_h, (n, num_heads, dim), dtype)
        for item in T.parallel(counts[2] * kv_heads):
            with T.sblock("attention"):
                vi = T.axis.spatial(counts[2] * kv_heads, item)
                T.reads()
                T.writes()
                kernel.task(
                    vi,
                    (q, pool, kv_open, kv_workspace, num_open, positions, table, tasks, layer, scratch, out),
                )
        if counts[3] > 0:
            for item in T.serial(counts[3] * num_heads):
                with T.sblock("merge"):
                    vi = T.axis.spatial(counts[3] * num_heads, item)
                    T.reads()
                    T.writes()
                    kernel.merge_task(vi, scratch, merges, out)

    return paged_attention
