"""What a module says of its cache: the arguments of the creation call, read into :class:`CacheGeometry`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import GenericConst, GlobalVar, IRModule, Op, StringImm

from kvq.config import LayerAttention, RopeKind
from kvq.errors import CompileError
from kvq.model.kv_cache import CREATE_GENERIC
from kvq.model.rope import rope_parameters
from kvq.schedules.attention_variant import AttentionVariant


@dataclass(frozen=True)
class CacheGeometry:
    """What the creation call says of a model's attention.

    Attributes
    ----------
    rope_local_theta : float or None
        Base of the ``local`` RoPE, which has no scaling.
    attn_logit_softcapping : float or None
    layers : tuple of LayerAttention
        Of each layer.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rope_scale: float
    rope_scaling: dict[str, Any]
    dtype: str
    rope_local_theta: float | None
    attn_logit_softcapping: float | None
    layers: tuple[LayerAttention, ...]

    @classmethod
    def from_call(cls, call: relax.Call) -> CacheGeometry:
        """Read the arguments of the generic creation call.

        Raises
        ------
        CompileError
            For a cache that kvq does not have: latent attention, windows that only TVM's own call knows, two
            head dims.
        """
        args = list(call.args)[1:]
        kinds = [a.value for a in ([args[0]] if isinstance(args[0], StringImm) else args[0].fields)]
        if any(kind != "mha" for kind in kinds):
            raise CompileError(f"attention kind {kinds[0]!r} cannot be compiled: only 'mha' is supported")
        layers, heads, kv_heads, qk_dim, v_dim = (int(args[i]) for i in range(3, 8))
        if qk_dim != v_dim:
            raise CompileError(f"head_dim of keys ({qk_dim}) and values ({v_dim}) must be equal")
        if heads % kv_heads:
            raise CompileError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
        factors = args[14]
        if isinstance(factors, GenericConst) and (factors.value.numpy() != 1).any():
            raise CompileError("RoPE extension factors (longrope) cannot be compiled")
        attributes = json.loads(args[18].value) if len(args) > 18 else {}
        described = [LayerAttention(**layer) for layer in attributes.get("layers", [])]
        rope_mode = int(args[10])
        return cls(
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=qk_dim,
            rotary_dim=int(args[15]) if rope_mode else 0,
            rope_theta=float(args[12].value),
            rope_scale=float(args[11].value),
            rope_scaling=json.loads(args[13].value),
            dtype=str(args[17].value),
            rope_local_theta=attributes.get("rope_local_theta"),
            attn_logit_softcapping=attributes.get("attn_logit_softcapping"),
            layers=tuple(described) or (LayerAttention(),) * layers,
        )

    def rope(self, kind: RopeKind) -> tuple[int, np.ndarray, float]:
        """Rotary dimensions, inverse frequencies (one where there is no RoPE) and attention factor."""
        if kind == "local" and self.rope_local_theta is not None:
            return self.rotary_dim, *rope_parameters(self.rope_local_theta, self.rotary_dim or 2)
        rotary_dim = self.rotary_dim if kind == "global" else 0
        scaling = self.rope_scaling if kind == "global" else None
        return rotary_dim, *rope_parameters(self.rope_theta, rotary_dim or 2, scaling, self.rope_scale)

    def variant(self, layer: int, sinks: bool) -> AttentionVariant:
        """The attention of a layer."""
        return AttentionVariant(self.layers[layer].window, self.attn_logit_softcapping, sinks)


def find_creation(mod: IRModule) -> tuple[GlobalVar, CacheGeometry] | None:
    """The function that creates the cache, with its geometry; None if the module has no cache."""
    for gv, func in mod.functions_items():
        if not isinstance(func, relax.Function):
            continue
        for call in calls_of(func, CREATE_GENERIC):
            return gv, CacheGeometry.from_call(call)
    return None


def calls_of(func: relax.Function, name: str) -> list[relax.Call]:
    """The calls of the packed function ``name`` in ``func``."""
    found: list[relax.Call] = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call) and callee_of(expr) == name:
            found.append(expr)

    relax.analysis.post_order_visit(func, visit)
    return found


def callee_of(call: relax.Call) -> str | None:
    """Name of the packed function that ``call_dps_packed`` or ``call_pure_packed`` calls."""
    if isinstance(call.op, Op) and call.args and isinstance(call.args[0], relax.ExternFunc):
        return str(call.args[0].global_symbol)
    return None
