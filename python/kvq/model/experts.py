"""A mixture of experts in place of a feed-forward network.

The frontend has no operator that multiplies each row by a matrix of its own. So the model makes two calls by
name, which the passes replace by kernels: :data:`ROUTE_EXPERTS` and :data:`EXPERT_LINEAR`.
"""

from __future__ import annotations

from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from kvq.config import ModelConfig

from .layers import DTYPE, activate

#: ``(logits float32[n, E], normalize)`` to the weights float32 ``[n, k]`` and numbers int32 ``[n, k]`` of the
#: ``k`` likeliest experts of each row; weights are probabilities, divided by their sum if asked.
ROUTE_EXPERTS = "kvq.route_experts"
#: ``(x, w[E * N, K], experts int32[n, k])`` to ``[n, k, N]``: ``x`` times the matrix of each of a row's
#: experts; ``x`` is ``[n, K]``, the same for all of them, or ``[n, k, K]``.
EXPERT_LINEAR = "kvq.expert_linear"


class ExpertLinear(nn.Module):
    """The matrices of all experts of a layer, one below the other."""

    def __init__(self, num_experts: int, inputs: int, outputs: int) -> None:
        self.outputs = outputs
        self.weight = nn.Parameter((num_experts * outputs, inputs), DTYPE)

    def forward(self, x: nn.Tensor, experts: nn.Tensor) -> nn.Tensor:
        call = relax.call_dps_packed(
            EXPERT_LINEAR,
            [x._expr, self.weight._expr, experts._expr],
            out_ty=relax.TensorType((*experts.shape, self.outputs), DTYPE),
        )
        return op.wrap_nested(call, "expert_linear")


class Experts(nn.Module):
    """The projections of a layer's experts; gate and up projection of an expert are one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        count, hidden, inter = config.num_experts, config.hidden_size, config.moe_intermediate_size
        assert count is not None and inter is not None
        self.gate_up_proj = ExpertLinear(count, hidden, 2 * inter)
        self.down_proj = ExpertLinear(count, inter, hidden)


class SparseMLP(nn.Module):
    """Each row goes through its likeliest experts; their results are added, weighted by the router."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.num_experts is not None and config.num_experts_per_tok is not None
        self.top_k, self.normalize = config.num_experts_per_tok, config.norm_topk_prob
        self.hidden_act = config.hidden_act
        self.gate = nn.Linear(config.hidden_size, config.num_experts, False, DTYPE)
        self.experts = Experts(config)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        n, k = x.shape[0], self.top_k
        weights, experts = self._route(self.gate(x))
        hidden = self.experts.gate_up_proj(x, experts)
        gate, up = op.split(op.reshape(hidden, (n * k, hidden.shape[2])), 2, axis=-1)
        hidden = activate(gate, self.hidden_act) * up
        out = self.experts.down_proj(op.reshape(hidden, (n, k, hidden.shape[1])), experts)
        return op.sum(out * op.reshape(weights, (n, k, 1)), axis=1)

    def _route(self, logits: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor]:
        shape = (logits.shape[0], self.top_k)
        call = relax.call_dps_packed(
            ROUTE_EXPERTS,
            [logits._expr, relax.prim_value(int(self.normalize))],
            out_ty=[relax.TensorType(shape, DTYPE), relax.TensorType(shape, "int32")],
        )
        weights, experts = op.wrap_nested(call, "route_experts")
        return weights, experts
