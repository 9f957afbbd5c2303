"""paged_attention for decode, on tensor cores: one query row a task.

A block of warps takes one attention task of one KV head (at most 8 of its query heads) and deals the task's
units, a page or a part of one, to its warps in turn. A warp copies its units into a ring of shared memory of
its own, a few ahead, and needs no barrier with the others until it is done. Rows of the own page go first,
dealt to the warps behind the units. ``paged_attention_unit.py`` is what a warp does with a unit,
``paged_attention_merge.py`` how warps and blocks come together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.layout import FRAGMENT_TILE, KVLayout
from kvq.schedules.cache_arguments import attention_arguments
from kvq.schedules.statements import put

from .decode_query import DecodeQuery, QueryPlace
from .mma import WARP, copies_commit, copies_wait, copy_async, emit, load_global, shuffle, u32, warp_sync
from .paged_attention_merge import Merge
from .paged_attention_unit import UnitAttention

#: Query heads of a block: columns of B.
BLOCK_HEADS = 8
#: Numbers of a task; :mod:`kvq.runtime.decode_plan` says which.
TASK_FIELDS = 8


#: Shared memory of a multiprocessor and of a block, in KiB, by compute capability.
_SHARED_KIB = {80: (164, 163), 86: (100, 99), 87: (164, 163), 89: (100, 99), 90: (228, 227)}
#: From here on, a kernel may start while the one before it runs.
_OVERLAP_FROM = 90


@dataclass(frozen=True)
class DecodeTuning:
    """How the kernel is cut; it changes the speed alone.

    Attributes
    ----------
    warps, stages : int
        Warps of a block, and units of a warp's ring.
    blocks_per_sm : int
        Blocks that must fit one multiprocessor, which limits registers.
    overlap : bool
        Start while the kernel before is running (programmatic dependent launch; sm_90 and newer).
    """

    warps: int = 4
    stages: int = 2
    blocks_per_sm: int = 1
    overlap: bool = False


def decode_tuning(layout: KVLayout, num_heads: int, archs: Sequence[str]) -> DecodeTuning:
    """The tuning for GPUs of every one of ``archs`` (``sm_90`` and the like), measured on an H200.

    Pages that are cheap to load and dear to unpack want more warps, the others deeper rings.
    """
    numbers = [int("".join(filter(str.isdigit, arch))) for arch in archs]
    overlap = min(numbers) >= _OVERLAP_FROM
    limits = [_SHARED_KIB.get(number, _SHARED_KIB[90 if number > 90 else 86]) for number in numbers]
    per_sm, per_block = (1024 * min(limit[i] for limit in limits) for i in range(2))
    bits = (layout.k_bits or 16) + (layout.v_bits or 16)
    shapes = [(3, 2), (2, 2), (3, 1), (2, 1)]
    if layout.head_dim <= 64 and bits <= 8:
        shapes.insert(0, (3 if bits < 8 else 2, 4))
    elif layout.head_dim <= 128 and bits < 8:
        shapes.insert(0, (2, 3))
    for stages, blocks in shapes:
        tuning = DecodeTuning(stages=stages, blocks_per_sm=blocks, overlap=overlap)
        size = _Decode(layout, num_heads, "float16", tuning).shared_bytes
        if size <= per_block and blocks * (size + 1024) <= per_sm:
            return tuning
    return DecodeTuning(stages=1, overlap=overlap)


class _Decode(UnitAttention):
    """The statements of the kernel, with its static geometry at hand."""

    def __init__(self, layout: KVLayout, num_heads: int, dtype: str, tuning: DecodeTuning) -> None:
        super().__init__(layout)
        self.tuning = tuning
        self.group = num_heads // layout.num_kv_heads
        self.parts = -(-self.group // BLOCK_HEADS)
        self.heads = -(-self.group // self.parts)
        self.merge = Merge(self.dim, self.heads, tuning.warps, dtype, rotated=layout.v_bits is not None)
        self.query_at = max(tuning.warps * tuning.stages * self.stage_bytes, self.merge.shared_bytes)
        self.queries = QueryPlace(layout, self.heads, tuning.warps)
        self.flag_bytes = self.query_at + self.queries.shared_bytes
        self.shared_bytes = self.flag_bytes + 16

    # ---- loading -------------------------------------------------------------------------------
    def load_ids(self, ids, table, task, first_unit, lane) -> None:
        """Pool pages of the warp's next 32 units, one a lane."""
        index = T.truncdiv(first_unit + lane * self.tuning.warps, self.per_page)
        put(ids, T.int32(0), 0)
        with T.If(index < task.sealed), T.Then():
            put(ids, table[task.table_start + index], 0)

    def start_copy(self, pool, ids, task, unit, number, ring, lane) -> None:
        """Start copying the warp's ``number``-th unit, ``unit`` of the task, into the stage at ``ring``."""
        page = T.bind(T.cast(shuffle(ids[0], T.bitwise_and(number, WARP - 1)), "int64"))
        part = T.truncmod(unit, self.per_page) if self.per_page > 1 else 0
        target = T.bind(ring + T.cast(lane * 16, "uint32"))
        for word, stride, at, size in self.sections:
            source = T.bind(pool.ptr_to([page, task.layer, task.head, word + stride * part + lane * 4]))
            for first in range(0, size, WARP * 16):
                rest = min(size - first, WARP * 16) // 16
                if rest == WARP:
                    copy_async(target, at + first, source, first)
                else:
                    with T.If(lane < rest), T.Then():
                        copy_async(target, at + first, source, first)

    # ---- a task --------------------------------------------------------------------------------
    def task(self, args, block, item, thread, shared, red, flag) -> None:
        """One attention task of one KV head, or of 8 of its query heads."""
        q, pool, kv_open, table, tasks, layer, scratch, out = args
        warps, stages = self.tuning.warps, self.tuning.stages
        lane, warp = T.bind(T.bitwise_and(thread, WARP - 1)), T.bind(T.shift_right(thread, 5))
        task = _Task(self, block, item, tasks, layer)
        units = T.bind(task.sealed * self.per_page)
        count = T.bind(T.truncdiv(T.max(units - warp + warps - 1, 0), warps))
        ids, later = T.alloc_local([1], "int32"), T.alloc_local([1], "int32")
        self.load_ids(ids, table, task, warp, lane)
        self.load_ids(later, table, task, warp + WARP * warps, lane)
        base = T.bind(T.cuda.cvta_generic_to_shared(shared.data))
        ring = T.bind(base + T.cast(warp * (stages * self.stage_bytes), "uint32"))
        if self.tuning.overlap:
            emit(T.ptx["griddepcontrol.launch_dependents"]())
        for s in range(stages):
            with T.If(s < count), T.Then():
                unit = warp + s * warps
                self.start_copy(pool, ids, task, unit, T.int32(s), ring + u32(s * self.stage_bytes), lane)
            copies_commit()
        if self.tuning.overlap:
            emit(T.ptx["griddepcontrol.wait"]())
        address = T.bind(base + u32(self.query_at))
        query = DecodeQuery(self.queries, self.scale_at, self.v_scale_at, address, warp, lane)
        query.load(q, task)
        state = tuple(T.alloc_local([n], "float32") for n in (4 * self.steps, 4, 2, 2))
        for buffer, n, value in zip(
            state, (4 * self.steps, 4, 2, 2), (0.0, 0.0, float("-inf"), 0.0), strict=True
        ):
            for i in range(n):
                put(buffer, T.float32(value), i)
        self._own_page(kv_open, task, units, warp, lane, query, state)
        stage, slot = T.alloc_local([1], "uint32"), T.alloc_local([1], "int32")
        put(stage, ring, 0)
        put(slot, T.int32(0), 0)
        with T.serial(count) as it:
            copies_wait(stages - 1)
            warp_sync()
            unit = T.bind(warp + it * warps)
            here = T.bind(stage[0])
            self.attend(here, T.truncmod(unit, self.per_page), lane, query, state)
            warp_sync()
            following = T.bind(it + stages)
            with T.If(following < count), T.Then():
                with T.If(T.bitwise_and(following, WARP - 1) == 0), T.Then():
                    put(ids, later[0], 0)
                    self.load_ids(later, table, task, warp + (following + WARP) * warps, lane)
                self.start_copy(pool, ids, task, unit + stages * warps, following, here, lane)
            copies_commit()
            put(slot, slot[0] + 1, 0)
            put(stage, here + u32(self.stage_bytes), 0)
            with T.If(slot[0] == stages), T.Then():
                put(slot, T.int32(0), 0)
                put(stage, ring, 0)
        self.merge.block(self.factors(), state, warp, lane, red, base)
        self.merge.finish(task, scratch, out, warp, lane, thread, red, base, flag)

    def _own_page(self, kv_open, task, units, warp, lane, query, state) -> None:
        warps, out = self.tuning.warps, state[0]
        tiles = T.truncdiv(task.own_rows + (FRAGMENT_TILE - 1), FRAGMENT_TILE)
        first = T.bind(T.bitwise_and(warp - units, warps - 1))
        rounds = T.bind(T.truncdiv(T.max(tiles - first + (warps - 1), 0), warps))
        with T.serial(rounds) as i:
            self.attend_rows(kv_open, task, first + i * warps, lane, query, state)
        if self.layout.v_bits is not None:
            even, odd = self.factors()[:2]
            for i in range(4 * self.steps):
                put(out, out[i] * T.float32(1 / (even, odd)[i % 4 // 2]), i)


class _Task:
    """Fields of a task, bound: one record, so that nothing waits for a second load."""

    def __init__(self, kernel: _Decode, block, item, tasks, layer) -> None:
        fields = T.alloc_local([TASK_FIELDS], "int32")
        record = T.bind(tasks.ptr_to([item, 0]))
        for i in range(0, TASK_FIELDS, 4):
            load_global(fields, i, 4, record, 4 * i, "s32")
        names = ("row", "table_start", "sealed", "row_page", "own_rows", "first_slot", "parts", "part")
        for i, name in enumerate(names):
            setattr(self, name, T.bind(fields[i]))
        self.row_page = T.bind(T.cast(self.row_page, "int64"))
        self.layer = layer
        self.head = T.bind(T.truncdiv(block, kernel.parts))
        self.head_in_group = T.bind(T.truncmod(block, kernel.parts) * kernel.heads)
        self.first_head = T.bind(self.head * kernel.group + self.head_in_group)
        self.heads = T.bind(T.min(kernel.heads, kernel.group - self.head_in_group))


def paged_attention_decode(
    layout: KVLayout, num_heads: int, dtype: str, tuning: DecodeTuning
) -> tirx.PrimFunc:
    """Build the kernel; ``layout`` is in the order ``fragments``, its rows in float16.

    Arguments of the kernel: :func:`kvq.schedules.cache_arguments.attention_arguments`, the tasks those of
    :mod:`kvq.runtime.decode_plan`; workspace, positions and merge tasks are not read. The scratch
    must have been zeroed once.
    """
    kernel = _Decode(layout, num_heads, dtype, tuning)
    shared_bytes, threads = kernel.shared_bytes, kernel.tuning.warps * WARP
    attributes = {"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True}
    if kernel.tuning.overlap:
        attributes["tirx.kernel_launch_params"] = ["tirx.use_programtic_dependent_launch"]
    limits = {
        "tirx.launch_bounds_min_blocks_per_sm": kernel.tuning.blocks_per_sm,
        "tirx.dyn_smem_bytes": shared_bytes,
    }
    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(attributes)
        a = attention_arguments(layout, num_heads, dtype, task_fields=TASK_FIELDS)
        T.device_entry()
        with T.attr(limits):
            block, item = T.cta_id([layout.num_kv_heads * kernel.parts, T.cast(a.num_tasks, "int32")])
            thread = T.thread_id([threads])
            shared = T.alloc_buffer((shared_bytes,), "uint8", scope="shared.dyn", align=128)

            def place(name: str, words: int, dtype: str, at: int):
                buffer = T.decl_buffer((words,), dtype, shared.data, elem_offset=at, scope="shared.dyn")
                return IRBuilder.name(name, buffer)

            flag_word = kernel.flag_bytes // 4
            red, flag = place("red", flag_word, "float32", 0), place("flag", 1, "int32", flag_word)
            arguments = (a.q, a.pool, a.kv_open, a.table, a.tasks, a.layer, a.scratch, a.out)
            with T.If(item < a.counts[2]), T.Then():
                kernel.task(arguments, block, item, thread, shared, red, flag)
    return script.get()
