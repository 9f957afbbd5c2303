"""The end of a decode task: warps into the block's result, blocks of one row into the row's.

Parts of a row that several blocks computed meet in ``attention_scratch``; whichever block is last adds them
up, so no other kernel is needed. Everything is fp32. A warp finishes one query head at a time, which keeps
the rotation of V, a Hadamard transform, within a warp.
"""

from __future__ import annotations

from math import gcd, sqrt

from tvm.script import tirx as T

from kvq.schedules.statements import put

from .mma import (
    WARP,
    block_sync,
    emit,
    exp2,
    load_global,
    load_shared,
    shuffle,
    shuffle_xor,
    store_global,
    store_shared,
)

#: Floats between the heads' results in shared memory, beyond the head_dim: keeps banks apart.
_PAD = 8
#: Parts that are read ahead, and floats of them that a lane can hold.
_AHEAD, _AHEAD_FLOATS = 16, 128


class Merge:
    """Statements that finish a task, for blocks of ``warps`` warps and ``heads`` query heads."""

    def __init__(self, dim: int, heads: int, warps: int, dtype: str, rotated: bool) -> None:
        self.dim, self.heads, self.warps, self.dtype, self.rotated = dim, heads, warps, dtype, rotated
        #: a lane's channels: vectors of ``width``, a vector of every lane after another
        self.width = max(1, gcd(dim, 4 * WARP) // WARP)
        self.rounds = -(-dim // (WARP * self.width))
        self.stride = dim + _PAD
        self.sums_at = warps * heads * self.stride
        self.shared_bytes = 4 * (self.sums_at + 2 * warps * heads)

    def block(self, factors, state, warp, lane, red, base) -> None:
        """Write the warp's state to shared memory, in true units.

        A lane has neighbouring channels of each sixteenth, so heads lie there in the order (2 i, g, x) of
        their channels ``g D/8 + 2 i + x``: stores of a warp fall into different banks.
        """
        out, zero, peak, total = state
        even, odd, point = factors
        g, c = T.bind(T.shift_right(lane, 2)), T.bind(T.bitwise_and(lane, 3))
        for y in range(2):
            for mask in (4, 8, 16):
                put(total, total[y] + shuffle_xor(total[y], mask), y)
        block_sync()
        for y in range(2):
            with T.If(2 * c + y < self.heads), T.Then():
                head = T.bind(warp * self.heads + 2 * c + y)
                row = T.bind(base + T.cast((head * self.stride + 2 * g) * 4, "uint32"))
                for i in range(self.dim // 16):
                    pair = [out[4 * i + 2 * x + y] for x in range(2)]
                    if even != 1:
                        shift = T.float32(point) * zero[y]
                        pair = [p * T.float32(f) - shift for p, f in zip(pair, (even, odd), strict=True)]
                    store_shared(row, 64 * i, pair)
                with T.If(g == 0), T.Then():
                    put(red, peak[y], self.sums_at + 2 * head)
                    put(red, total[y], self.sums_at + 2 * head + 1)
        block_sync()

    def finish(self, task, scratch, out, warp, lane, thread, red, base, flag) -> None:
        """Add up the warps and write the row, or this part of it; the last part adds up all of them."""

        def each_head(body) -> None:
            for i in range(-(-self.heads // self.warps)):
                head = T.bind(warp + i * self.warps)
                with T.If(head < task.heads), T.Then():
                    body(head)

        def whole(head) -> None:
            values, _, total = self._add_warps(head, lane, red, base)
            self._write(values, total, task, head, lane, out)

        def part(head) -> None:
            values, peak, total = self._add_warps(head, lane, red, base)
            slot = T.cast(task.first_slot + task.part, "int64")
            for r, channel in self._channels(lane):
                target = scratch.ptr_to([slot, task.first_head + head, channel])
                store_global(target, 0, [values[r * self.width + i] for i in range(self.width)])
            with T.If(lane == 0), T.Then():
                store_global(scratch.ptr_to([slot, task.first_head + head, self.dim]), 0, [peak, total])

        with T.If(task.parts == 1):
            with T.Then():
                each_head(whole)
            with T.Else():
                each_head(part)
                counter = scratch.ptr_to([T.cast(task.first_slot, "int64"), task.first_head, self.dim + 2])
                block_sync()
                with T.If(thread == 0), T.Then():
                    emit(T.ptx["atom.acq_rel.gpu.global.add.s32"](flag[0], counter, T.int32(1)))
                block_sync()
                with T.If(flag[0] == task.parts - 1), T.Then():
                    emit(T.ptx["fence.acq_rel.gpu"]())
                    with T.If(thread == 0), T.Then():
                        put(scratch, T.float32(0), task.first_slot, task.first_head, self.dim + 2)
                    self._add_parts(task, warp, lane, scratch, out)

    def _channels(self, lane):
        """(round, first channel of the lane's vector), for every round of vectors."""
        for r in range(self.rounds):
            channel = T.bind((r * WARP + lane) * self.width)
            if (r + 1) * WARP * self.width <= self.dim:
                yield r, channel
            else:
                with T.If(channel < self.dim), T.Then():
                    yield r, channel

    def _clear(self):
        values = T.alloc_local([self.rounds * self.width], "float32")
        for i in range(self.rounds * self.width):
            put(values, T.float32(0), i)
        return values

    def _add_warps(self, head, lane, red, base):
        """The lane's channels of a head over the block's warps, with their maximum and sum."""
        values, held = self._clear(), T.alloc_local([self.width], "float32")
        weight, sums = T.alloc_local([self.warps], "float32"), T.alloc_local([2], "float32")
        at = [T.bind(self.sums_at + 2 * (w * self.heads + head)) for w in range(self.warps)]
        most = red[at[0]]
        for w in range(1, self.warps):
            most = T.max(most, red[at[w]])
        put(sums, most, 0)
        put(sums, T.float32(0), 1)
        for w in range(self.warps):
            # a warp without a unit has -inf and weighs nothing
            exp2(weight, w, red[at[w]] - sums[0])
            put(sums, sums[1] + weight[w] * red[at[w] + 1], 1)
            row = T.bind(base + T.cast((w * self.heads + head) * (4 * self.stride), "uint32"))
            for r, channel in self._channels(lane):
                g = T.truncdiv(channel, self.dim // 8)
                place = T.bind((T.truncmod(channel, self.dim // 8) * 8 + 2 * g) * 4)
                if self.width == 1:  # an odd channel lies beside the even one
                    place = T.bind(place - T.bitwise_and(channel, 1) * 28)
                for i in range(0, self.width, 2):
                    pair = min(self.width, 2)
                    load_shared(held, i, pair, row + T.cast(place, "uint32"), 32 * i, "f32")
                for i in range(self.width):
                    put(values, values[r * self.width + i] + weight[w] * held[i], r * self.width + i)
        return values, sums[0], sums[1]

    def _add_parts(self, task, warp, lane, scratch, out) -> None:
        """Add up the parts of a row, 32 at a time, and write it: all of the warp's heads at once."""
        own = range(-(-self.heads // self.warps))
        heads = [T.bind(T.min(warp + h * self.warps, task.heads - 1)) for h in own]
        count = self.rounds * self.width
        depth = max(4, min(_AHEAD, _AHEAD_FLOATS // (count * len(own))))
        held = T.alloc_local([2 * len(own)], "float32")
        most, total, weight, peak, fade = (T.alloc_local([len(own)], "float32") for _ in range(5))
        values = T.alloc_local([count * len(own)], "float32")
        ahead = T.alloc_local([depth * count * len(own)], "float32")
        for h in own:
            put(peak, T.float32("-inf"), h)
            put(total, T.float32(0), h)
            for i in range(count):
                put(values, T.float32(0), h * count + i)

        def load(begin) -> None:
            for k in range(depth):
                slot = T.bind(T.cast(task.first_slot + T.min(begin + k, task.parts - 1), "int64"))
                for h in own:
                    for r, channel in self._channels(lane):
                        source = scratch.ptr_to([slot, task.first_head + heads[h], channel])
                        at = (k * len(own) + h) * count + r * self.width
                        load_global(ahead, at, self.width, source, 0, "f32", ".cg")

        with T.serial(T.truncdiv(task.parts + (WARP - 1), WARP)) as batch:
            begin = T.bind(batch * WARP)
            for h in own:
                put(held, T.float32("-inf"), 2 * h)
                put(held, T.float32(0), 2 * h + 1)
            with T.If(begin + lane < task.parts), T.Then():
                slot = T.bind(T.cast(task.first_slot + begin + lane, "int64"))
                for h in own:
                    source = scratch.ptr_to([slot, task.first_head + heads[h], self.dim])
                    load_global(held, 2 * h, 2, source, 0, "f32", ".cg")
            load(begin)
            for h in own:
                put(most, held[2 * h], h)
                for mask in (1, 2, 4, 8, 16):
                    put(most, T.max(most[h], shuffle_xor(most[h], mask)), h)
                put(most, T.max(most[h], peak[h]), h)
                exp2(fade, h, peak[h] - most[h])
                put(peak, most[h], h)
                exp2(weight, h, held[2 * h] - most[h])
                put(total, total[h] * fade[h] + weight[h] * held[2 * h + 1], h)
                for i in range(h * count, (h + 1) * count):
                    put(values, values[i] * fade[h], i)
            groups = T.bind(T.truncdiv(T.min(task.parts - begin, WARP) + (depth - 1), depth))
            with T.serial(groups) as group:
                with T.If(group > 0), T.Then():
                    load(begin + group * depth)
                for k in range(depth):
                    for h in own:
                        share = T.bind(shuffle(weight[h], group * depth + k))
                        for r, _ in self._channels(lane):
                            for i in range(r * self.width, (r + 1) * self.width):
                                part = ahead[(k * len(own) + h) * count + i]
                                put(values, values[h * count + i] + share * part, h * count + i)
        for h in own:
            for mask in (1, 2, 4, 8, 16):
                put(total, total[h] + shuffle_xor(total[h], mask), h)
            with T.If(warp + h * self.warps < task.heads), T.Then():
                result = T.alloc_local([count], "float32")
                for i in range(count):
                    put(result, values[h * count + i], i)
                self._write(result, total[h], task, heads[h], lane, out)

    def _write(self, values, total, task, head, lane, out) -> None:
        """Divide by the sum, undo the rotation of V, and write the lane's channels."""
        block = self.dim & -self.dim if self.rotated else 1
        scale = T.bind(T.float32(1 / sqrt(block)) / total)
        for i in range(self.rounds * self.width):
            put(values, values[i] * scale, i)
        stride = 1
        while stride < block:
            self._butterflies(values, stride, lane)
            stride *= 2
        for r, channel in self._channels(lane):
            for i in range(self.width):
                value = T.cast(values[r * self.width + i], self.dtype)
                put(out, value, task.row, task.first_head + head, channel + i)

    def _butterflies(self, values, stride: int, lane) -> None:
        """One step of the transform: sums and differences of channels ``stride`` apart."""
        count, width = self.rounds * self.width, self.width
        if width <= stride < WARP * width:
            mask = stride // width
            sign = T.bind(T.Select(T.bitwise_and(lane, mask) == 0, T.float32(1), T.float32(-1)))
            for i in range(count):
                put(values, shuffle_xor(values[i], mask) + sign * values[i], i)
            return
        step = stride if stride < width else stride // WARP
        for i in range(count):
            if i & step == 0:
                low, high = T.bind(values[i]), T.bind(values[i + step])
                put(values, low + high, i)
                put(values, low - high, i + step)
