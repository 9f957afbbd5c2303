"""Mixtures of experts: which experts a row uses, and products with their matrices.

A product reads the matrix of a row's expert for that row alone: as fast as it can be for the few rows of a
decode step, and right for many.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kvq.schedules.statements import put, when

from .block import ATTRIBUTES, launch, local
from .limits import GpuLimits
from .linear_rows import multiply_rows, rows_tuning
from .stored_weight import declare_weight

#: Rows of a workgroup, a thread each.
_ROWS = 64
#: Below every logit: an expert that is already chosen.
_CHOSEN = -3.4e38


def route_experts(num_experts: int, top_k: int, normalize: bool, limits: GpuLimits) -> tirx.PrimFunc:
    """Build the choice of each row's ``top_k`` likeliest experts; of equals the first. A thread a row.

    Arguments of the kernel: logits ``float32[n, num_experts]``, weights ``float32[n, top_k]``, experts
    ``int32[n, top_k]``. Weights are the softmax over all experts, or over the chosen ones if normalized.
    """
    threads = min(_ROWS, limits.threads)
    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        n = IRBuilder.name("n", T.int32())
        logits = builder.arg("logits", T.Buffer((n, num_experts), "float32"))
        weights = builder.arg("weights", T.Buffer((n, top_k), "float32"))
        experts = builder.arg("experts", T.Buffer((n, top_k), "int32"))
        with launch([T.truncdiv(n + (threads - 1), threads)], threads) as (block, thread):
            row = T.bind(block * threads + thread)

            def route():
                chosen, best = local((top_k,), "int32"), local((1,), "int32")
                highest, total = local((1,), "float32"), local((1,), "float32")
                for j in range(top_k):
                    put(best, T.int32(0), 0)
                    put(highest, T.float32(_CHOSEN), 0)
                    with T.serial(num_experts) as e:
                        better = logits[row, e] > highest[0]
                        for i in range(j):
                            better = T.And(better, chosen[i] != e)

                        def take(e=e):
                            put(highest, logits[row, e], 0)
                            put(best, e, 0)

                        when(better, take)
                    put(chosen, best[0], j)
                    put(experts, best[0], row, j)
                # relative to the likeliest expert, so that no exponent is above 0
                most = T.bind(logits[row, chosen[0]])
                put(total, T.float32(0), 0)
                if normalize:
                    for j in range(top_k):
                        put(total, total[0] + T.exp(logits[row, chosen[j]] - most), 0)
                else:
                    with T.serial(num_experts) as e:
                        put(total, total[0] + T.exp(logits[row, e] - most), 0)
                for j in range(top_k):
                    put(weights, T.exp(logits[row, chosen[j]] - most) / total[0], row, j)

            when(row < n, route)
    return script.get()


def expert_linear(
    n_out: int, k: int, num_experts: int, top_k: int, shared: bool, storage: str, limits: GpuLimits
) -> tirx.PrimFunc:
    """Build ``y[i, j] = x[i] @ w[experts[i, j]].T``; ``x[i, j]`` where inputs are not shared.

    Arguments of the kernel: x ``float32[n, K]`` or ``[n, top_k, K]``, the tensors of the weight
    ``[num_experts * N, K]``, experts ``int32[n, top_k]``, y ``float32[n, top_k, N]``.

    Raises
    ------
    CompileError
        If K is no multiple of 8.
    """
    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        n = IRBuilder.name("n", T.int32())
        x = builder.arg("x", T.Buffer((n, k) if shared else (n, top_k, k), "float32"))
        weight = declare_weight(num_experts * n_out, k, storage)
        experts = builder.arg("experts", T.Buffer((n, top_k), "int32"))
        y = builder.arg("y", T.Buffer((n, top_k, n_out), "float32"))

        def slot(number):
            return T.truncdiv(number, top_k), T.truncmod(number, top_k)

        def input_of(number, column):
            i, j = slot(number)
            return x[i, column] if shared else x[i, j, column]

        multiply_rows(
            weight,
            rows_tuning(n_out, k, limits),
            1,
            k,
            n * top_k,
            lambda number: T.bind(experts[slot(number)] * n_out),
            n_out,
            input_of,
            lambda number, output, value: put(y, value, *slot(number), output),
        )
    return script.get()
