"""Mixtures of experts: which experts a row uses, and products with their matrices.

A task of the product is one expert's block of 16 outputs. It looks for the rows that chose the expert, and
makes float32 of the block once for all of them; blocks that nobody chose cost a look. Tasks of one expert lie
far apart, so that threads share the work whichever experts are chosen. A row's sum runs over the inputs in
order, so it has the same bits in every batch.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from kvq.errors import CompileError
from kvq.schedules.statements import put, run

from .linear import ATTRIBUTES, CHUNK
from .vector import CpuIsa, constant, exp, fma, for_blocks, for_rows, splat
from .weight_blocks import BLOCK, WeightBlocks

#: Below every logit: an expert that is already chosen.
_CHOSEN = -3.4e38
_LANES = 8


def route_experts(num_experts: int, top_k: int, normalize: bool) -> tirx.PrimFunc:
    """Build the choice of each row's ``top_k`` likeliest experts; of equals the first.

    Arguments of the kernel: logits ``float32[n, num_experts]``, weights ``float32[n, top_k]``, experts
    ``int32[n, top_k]``. Weights are the softmax over all experts, or over the chosen ones if normalized.
    """

    padded = -(-num_experts // _LANES) * _LANES

    def route_row(i, logits, weights, experts):
        left = T.sblock_alloc_buffer((num_experts,), "float32")
        likelihood = T.sblock_alloc_buffer((padded,), "float32")
        best = T.sblock_alloc_buffer((1,), "int32")
        total = T.sblock_alloc_buffer((1,), "float32")
        with T.serial(padded) as e:
            put(likelihood, T.float32(_CHOSEN), e)
        with T.serial(num_experts) as e:
            put(left, logits[i, e], e)
            put(likelihood, logits[i, e], e)
        with T.serial(top_k) as j:
            put(best, T.int32(0), 0)
            with T.serial(num_experts) as e, T.If(left[e] > left[best[0]]), T.Then():
                put(best, T.cast(e, "int32"), 0)
            put(experts, best[0], i, j)
            put(left, T.float32(_CHOSEN), best[0])
        # relative to the likeliest expert, so that no exponent is above 0
        highest = T.bind(splat(logits[i, experts[i, 0]], _LANES))
        with T.serial(padded // _LANES) as v:
            at = run(v * _LANES, _LANES)
            put(likelihood, exp(likelihood[at] - highest, _LANES), at)
        put(total, T.float32(0), 0)
        with T.serial(top_k if normalize else num_experts) as j:
            put(total, total[0] + likelihood[experts[i, j] if normalize else j], 0)
        with T.serial(top_k) as j:
            put(weights, likelihood[experts[i, j]] / total[0], i, j)

    @T.prim_func(s_tir=True, private=True)
    def route_experts(logits_h: T.handle, weights_h: T.handle, experts_h: T.handle):
        T.func_attr(ATTRIBUTES)
        n = T.int64()
        logits = T.match_buffer(logits_h, (n, num_experts), "float32")
        weights = T.match_buffer(weights_h, (n, top_k), "float32")
        experts = T.match_buffer(experts_h, (n, top_k), "int32")
        for_rows(n, route_row, logits, weights, experts)

    return route_experts


def expert_linear(
    n_out: int, k: int, num_experts: int, top_k: int, shared: bool, storage: str, isa: CpuIsa
) -> tirx.PrimFunc:
    """Build ``y[i, j] = x[i] @ w[experts[i, j]].T``; ``x[i, j]`` where inputs are not shared.

    Arguments of the kernel: x ``float32[n, K]`` or ``[n, top_k, K]``, the tensors of the weight
    ``[num_experts * N, K]`` (``weight_blocks.py``), experts ``int32[n, top_k]``, y ``float32[n, top_k, N]``.

    Raises
    ------
    CompileError
        If an expert is no whole number of blocks.
    """
    if n_out % BLOCK:
        raise CompileError(f"experts of {n_out} outputs cannot be compiled: no multiple of {BLOCK}")
    weight, lanes = WeightBlocks(num_experts * n_out, k, storage), isa.lanes
    blocks, parts = n_out // BLOCK, BLOCK // isa.lanes
    codes, scales = weight.code_shape, weight.scale_shape
    x_shape = (k,) if shared else (top_k, k)

    def task(number, x, weights, experts, y, n):
        expert = T.bind(T.truncmod(number, num_experts))
        part_block = T.bind(T.truncdiv(number, num_experts))
        block = T.bind(expert * blocks + part_block)
        acc = T.sblock_alloc_buffer((parts, lanes), "float32")
        wt = T.sblock_alloc_buffer((min(k, CHUNK) * BLOCK,), "float32")
        used = T.sblock_alloc_buffer((1,), "int32")

        def for_slots(body):
            with T.serial(n) as i, T.serial(top_k) as j, T.If(experts[i, j] == expert), T.Then():
                body(i, j)

        def chunk(start, count: int, is_first):
            weight.to_float(weights, block, start, count, wt, isa)

            def row(i, j):
                at = [run(part_block * BLOCK + part * lanes, lanes) for part in range(parts)]
                for part in range(parts):
                    before = T.Select(is_first, constant(0, lanes), y[i, j, at[part]])
                    put(acc, before, part, run(0, lanes))
                with T.serial(count) as c:
                    value = T.bind(splat(x[i, start + c] if shared else x[i, j, start + c], lanes))
                    for part in range(parts):
                        column = wt[run(c * BLOCK + part * lanes, lanes)]
                        total = fma(value, column, acc[part, run(0, lanes)], lanes)
                        put(acc, total, part, run(0, lanes))
                for part in range(parts):
                    put(y, acc[part, run(0, lanes)], i, j, at[part])

            for_slots(row)

        put(used, T.int32(0), 0)
        for_slots(lambda i, j: put(used, T.int32(1), 0))
        with T.If(used[0] > 0), T.Then():
            whole = k // CHUNK
            if whole:
                with T.serial(whole) as c:
                    chunk(c * CHUNK, CHUNK, c == 0)
            if k % CHUNK:
                chunk(whole * CHUNK, k % CHUNK, T.bool(whole == 0))

    if weight.kind.bits is None:

        @T.prim_func(s_tir=True, private=True)
        def expert_linear_float(
            x_h: T.handle, w: T.Buffer(weight.float_shape, storage), experts_h: T.handle, y_h: T.handle
        ):
            T.func_attr(ATTRIBUTES)
            n = T.int64()
            x = T.match_buffer(x_h, (n, *x_shape), "float32")
            experts = T.match_buffer(experts_h, (n, top_k), "int32")
            y = T.match_buffer(y_h, (n, top_k, n_out), "float32")
            for_blocks(num_experts * blocks, task, x, (w,), experts, y, n)

        return expert_linear_float

    if weight.kind.offset is None:

        @T.prim_func(s_tir=True, private=True)
        def expert_linear_codes(
            x_h: T.handle,
            w: T.Buffer(codes, "uint32"),
            s: T.Buffer(scales, "float16"),
            experts_h: T.handle,
            y_h: T.handle,
        ):
            T.func_attr(ATTRIBUTES)
            n = T.int64()
            x = T.match_buffer(x_h, (n, *x_shape), "float32")
            experts = T.match_buffer(experts_h, (n, top_k), "int32")
            y = T.match_buffer(y_h, (n, top_k, n_out), "float32")
            for_blocks(num_experts * blocks, task, x, (w, s), experts, y, n)

        return expert_linear_codes

    @T.prim_func(s_tir=True, private=True)
    def expert_linear_offset(
        x_h: T.handle,
        w: T.Buffer(codes, "uint32"),
        s: T.Buffer(scales, "float16"),
        z: T.Buffer(scales, "float16"),
        experts_h: T.handle,
        y_h: T.handle,
    ):
        T.func_attr(ATTRIBUTES)
        n = T.int64()
        x = T.match_buffer(x_h, (n, *x_shape), "float32")
        experts = T.match_buffer(experts_h, (n, top_k), "int32")
        y = T.match_buffer(y_h, (n, top_k, n_out), "float32")
        for_blocks(num_experts * blocks, task, x, (w, s, z), experts, y, n)

    return expert_linear_offset
