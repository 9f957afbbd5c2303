"""Each pass as IR before and after, and the KV rewrite of a foreign module run against numpy.

The texts under ``goldens/ir`` are Relax functions as TVM prints them: ``KVQ_UPDATE_GOLDENS=1`` writes them
anew, for a reviewer to read.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.ir import StringImm
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op, spec

from foreign_module import DIM, HEADS, KV_HEADS, LAYERS, ROTARY, THETA, foreign_module
from kernel_rig import relative_error
from kvq.compiler.target import cpu_target
from kvq.config import ModelConfig
from kvq.errors import CompileError
from kvq.layout import KVLayout
from kvq.model.experts import SparseMLP
from kvq.passes.attach_metadata import AttachMetadata
from kvq.passes.bound_rows import BoundRows, step_storage_bytes
from kvq.passes.cache_geometry import find_creation
from kvq.passes.fuse_pointwise import FusePointwise
from kvq.passes.lower_experts import LowerExperts
from kvq.passes.lower_kv_cache import CACHE_PARAMETERS, LowerPagedKVCache
from kvq.passes.lower_weights import LowerWeights, WeightPlan
from kvq.passes.specialize_rows import MOST_ROWS, SpecializeRows
from kvq.quantization.scheme import WEIGHT_SCHEMES, KVQuantization
from kvq.runtime.kv_cache import PagedKVCache
from kvq.runtime.step_plan import StepPlan, build_step
from kvq.schedules.cache_arguments import SCRATCH_EXTRA
from kvq.schedules.cpu.backend import CpuKernels
from kvq.schedules.cpu.paged_attention import SPLIT_PAGES, TILE_ROWS
from kvq.schedules.cpu.vector import CpuIsa
from kvq.schedules.cuda import gemv_rows
from kvq.schedules.cuda.backend import CudaKernels

GOLDENS = Path(__file__).parent / "goldens" / "ir"
KERNELS = CpuKernels(CpuIsa(8, "generic"))


def relax_text(mod: tvm.IRModule) -> str:
    """The module's Relax functions as text, without their kernels."""
    lines = []
    for gv, func in sorted(mod.functions_items(), key=lambda item: item[0].name_hint):
        if isinstance(func, relax.Function):
            text = func.with_attr("global_symbol", gv.name_hint).script(show_meta=False)
            lines += [
                line for line in text.splitlines() if not line.startswith("#") and "TypeVar" not in line
            ]
    return "\n".join(line.rstrip() for line in lines if line.strip()) + "\n"


def check(name: str, before: tvm.IRModule, after: tvm.IRModule) -> None:
    """Compare both texts with the golden ones."""
    for stage, mod in (("before", before), ("after", after)):
        path, text = GOLDENS / f"{name}_{stage}.txt", relax_text(mod)
        if os.environ.get("KVQ_UPDATE_GOLDENS"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), f"{path} differs"


class Mlp(nn.Module):
    """A norm, a gated network and a residual; an embedding that is also the output head."""

    def __init__(self) -> None:
        self.embed = nn.Embedding(48, 64, "float32")
        self.norm = nn.RMSNorm(64, -1, 1e-5, bias=False, dtype="float32")
        self.up = nn.Linear(64, 128, True, "float32")
        self.down = nn.Linear(64, 64, False, "float32")

    def main(self, ids: nn.Tensor) -> nn.Tensor:
        x = self.embed(ids)
        gate, up = op.split(self.up(self.norm(x)), 2, axis=-1)
        x = x + self.down(op.silu(gate) * up)
        return op.matmul(x, op.permute_dims(self.embed.weight))


def mlp_module() -> tuple[tvm.IRModule, list[tuple[str, tuple[int, ...]]]]:
    packed = {"param_mode": "packed", "effect_mode": "none"}
    mod, params, _ = Mlp().export_tvm(
        spec={"main": {"ids": spec.Tensor(["n"], "int32"), "$": packed}}, allow_extern=True
    )
    return mod, [(name, tuple(int(s) for s in p.shape)) for name, p in params]


def weight_plan(scheme: str, params: list[tuple[str, tuple[int, ...]]]) -> WeightPlan:
    plan = WeightPlan(KERNELS)
    for name, shape in params:
        plan.add(name, shape, WEIGHT_SCHEMES[scheme].storage(name, len(shape) > 1))
    return plan


def test_kv_rewrite_of_a_foreign_module():
    before = foreign_module()
    after = LowerPagedKVCache(KVQuantization("int4", "int3"), 64, "float16", KERNELS)(before)
    check("lower_kv_cache", before, after)
    kernels = {gv.name_hint for gv, func in after.functions_items() if not isinstance(func, relax.Function)}
    assert kernels == {"rope_table", "kv_append_0_125", "kv_seal", "paged_attention", "kv_carry"}
    again = LowerPagedKVCache(KVQuantization("int4", "int3"), 64, "float16", KERNELS)(after)
    tvm.ir.assert_structural_equal(again, after)  # nothing is left to rewrite


@pytest.mark.parametrize(("scheme", "exact"), [("q4f16_1", False), ("q4f16_1", True), ("q0f16", False)])
def test_lower_weights(scheme, exact):
    before, params = mlp_module()
    after = LowerWeights(weight_plan(scheme, params), exact)(before)
    check(f"lower_weights_{scheme}{'_exact' if exact else ''}", before, after)


def test_experts():
    """The choice of experts, then the products with what is stored of them; the router stays as it is."""
    config = ModelConfig(
        model_type="mixtral",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        rms_norm_eps=1e-5,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
    packed = {"param_mode": "packed", "effect_mode": "none"}
    before, params, _ = SparseMLP(config).export_tvm(
        spec={"forward": {"x": spec.Tensor(["n", 64], "float32"), "$": packed}}, allow_extern=True
    )
    plan, scheme = WeightPlan(KERNELS), WEIGHT_SCHEMES["q4f16_1"]
    for name, param in params:
        plan.add(name, tuple(int(s) for s in param.shape), scheme.storage(name, name != "gate.weight"))
    after = LowerWeights(plan, False)(LowerExperts(KERNELS)(before))
    check("experts", before, after)


def test_fuse_pointwise():
    mod, params = mlp_module()
    before = LowerWeights(weight_plan("q4f16_1", params), False)(mod)
    after = relax.transform.DeadCodeElimination(["main"])(FusePointwise(KERNELS)(before))
    check("fuse_pointwise", before, after)


def test_a_residual_that_is_used_twice_is_not_fused():
    class Twice(Mlp):
        def main(self, ids: nn.Tensor) -> nn.Tensor:
            x = self.embed(ids)
            y = self.down(x)
            return (x + y) * y

    packed = {"param_mode": "packed", "effect_mode": "none"}
    mod, params, _ = Twice().export_tvm(
        spec={"main": {"ids": spec.Tensor(["n"], "int32"), "$": packed}}, allow_extern=True
    )
    plan = weight_plan("q4f16_1", [(name, tuple(int(s) for s in p.shape)) for name, p in params])
    after = FusePointwise(KERNELS)(LowerWeights(plan, False)(mod))
    assert "linear_q8_add" not in relax_text(after) and "R.add" in relax_text(after)


def cuda_mlp(bias: bool, most_rows: int | None = None) -> str:
    """The MLP with CUDA's kernels, for any or few rows, as text."""

    class Gated(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(64, 128, bias, "float32")

    packed = {"param_mode": "packed", "effect_mode": "none"}
    mod, params, _ = Gated().export_tvm(
        spec={"main": {"ids": spec.Tensor(["n"], "int32"), "$": packed}}, allow_extern=True
    )
    if most_rows is not None:
        mod["main"] = mod["main"].with_attr(MOST_ROWS, most_rows)
    kernels = CudaKernels(("sm_90a",), "float16")
    plan = WeightPlan(kernels)
    for name, param in params:
        shape = tuple(int(s) for s in param.shape)
        plan.add(name, shape, WEIGHT_SCHEMES["q4f16_1"].storage(name, len(shape) > 1))
    after = FusePointwise(kernels)(LowerWeights(plan, False)(mod))
    return relax_text(relax.transform.DeadCodeElimination(["main"])(after))


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_gated_where_the_backend_does_that(bias):
    text = cuda_mlp(bias)
    assert ("silu_gated_linear_f16_int4_128x64" in text) is not bias
    assert ("silu_gate_64_quantize_operand" in text) is bias


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_fewest_rows_make_them(bias):
    """The norm before a product, its gate and the residual are one kernel each; what is between stays."""
    text = cuda_mlp(bias, gemv_rows.MOST_ROWS)
    calls = [name for name in re.findall(r"R\.call_tir\((\w+)", text) if not name.startswith("prepare_")]
    first = "norm_1em05_linear_f16_int4_128x64_rows4"
    gated = [first, "silu_gate_64_quantize"] if bias else [f"silu_gated_{first}"]
    last = ["linear_f16_add_int4_64x64_rows4", "rounding_linear_f16_int4_48x64_rows4"]
    assert calls == ["embedding_int4_48x64", *gated, *last]


def test_attach_metadata():
    mod, _ = mlp_module()
    after = AttachMetadata({"a": [1, "é"]})(mod)
    machine = relax.VirtualMachine(tvm.compile(after, cpu_target().target), tvm.cpu())
    assert json.loads(str(machine["_metadata"]())) == {"a": [1, "é"], "step_bytes": 0, "token_function": None}
    tvm.ir.assert_structural_equal(after["main"], mod["main"])


def test_steps_take_the_storage_of_the_largest():
    bb = relax.BlockBuilder()
    for name in ("prefill", "decode"):
        n = tirx.Var("n", "int64")
        rows = relax.Var("rows", relax.TensorType((1, n) if name == "prefill" else (n, 1), "float32"))
        wide, narrow = (
            relax.Var(text, relax.TensorType(shape, "float32"))
            for text, shape in (("wide", (1, 2048)), ("narrow", (2048, 1024)))
        )
        with bb.function(name, [rows, wide, narrow]):
            x = bb.emit(relax.op.matmul(relax.op.reshape(rows, (n, 1)), wide))
            bb.emit_func_output(bb.emit(relax.op.matmul(x, narrow)))
    mod = BoundRows({"prefill": 9, "decode": 5})(SpecializeRows((4,))(bb.get()))
    target = cpu_target().target
    with target:
        lowered = relax.get_default_pipeline(target)(mod)
    # float32 rows of 2,048 for every number of rows, results of decode, and a page of reshaped rows
    assert step_storage_bytes(lowered) == 4 * (2048 * (9 + 5 + 4) + 1024 * (5 + 4)) + 4096
    machine = relax.VirtualMachine(tvm.compile(lowered, target, relax_pipeline=None), tvm.cpu())
    weights = [np.ones((1, 2048), np.float32), np.full((2048, 1024), 0.5, np.float32)]
    tensors = [tvm.runtime.tensor(weight) for weight in weights]
    for name, rows in (("prefill", 9), ("prefill", 2), ("decode", 5), ("decode_4", 3)):
        x = np.arange(rows, dtype=np.float32).reshape((1, rows) if name == "prefill" else (rows, 1))
        found = machine[name](tvm.runtime.tensor(x), *tensors).numpy()
        np.testing.assert_array_equal(found, np.arange(rows)[:, None] * np.full(1024, 1024.0))
    with pytest.raises(Exception, match="torage"):
        machine["decode"](tvm.runtime.tensor(np.ones((6, 1), np.float32)), *tensors)


def creation_with(**changes: object) -> tvm.IRModule:
    """The foreign module with arguments of its creation call replaced, by index."""
    mod = foreign_module()
    func = mod["create_paged_kv_cache"]
    binding = func.body.blocks[0].bindings[0]
    args = list(binding.value.args)
    for index, value in changes.items():
        args[int(index[1:]) + 1] = value
    bb = relax.BlockBuilder()
    with bb.function("create_paged_kv_cache", list(func.params)):
        bb.emit_func_output(bb.emit(relax.Call(binding.value.op, args, None, binding.value.ty_args)))
    mod.update_func(mod.get_global_var("create_paged_kv_cache"), bb.get()["create_paged_kv_cache"])
    return mod


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a0": StringImm("mla")}, "attention kind 'mla'"),
        ({"a7": relax.prim_value(128)}, "keys .64. and values .128."),
        ({"a5": relax.prim_value(3)}, "4 query heads are no multiple of 3"),
        ({"a13": StringImm('{"rope_type": "spiral"}')}, "rope_scaling 'spiral'"),
        ({"a14": relax.const(np.full(4, 2, np.float32))}, "extension factors"),
    ],
)
def test_a_cache_that_kvq_does_not_have_is_refused(changes, message):
    with pytest.raises(CompileError, match=message):
        LowerPagedKVCache(KVQuantization(), 64, "float16", KERNELS)(creation_with(**changes))


def test_geometry_is_read_from_the_creation_call():
    found = find_creation(foreign_module())
    assert found is not None
    geometry = found[1]
    assert (geometry.num_layers, geometry.num_heads, geometry.num_kv_heads) == (LAYERS, HEADS, KV_HEADS)
    assert (geometry.head_dim, geometry.rotary_dim, geometry.rope_theta) == (DIM, ROTARY, THETA)
    assert geometry.rope_scaling == {"rope_type": "linear", "factor": 2.0} and geometry.dtype == "float16"


class ForeignRig:
    """Runs the rewritten foreign module through the runtime's plans."""

    def __init__(self, kv: KVQuantization, opt: str) -> None:
        target = cpu_target(opt)
        mod = LowerPagedKVCache(kv, 64, "float16", target.kernels)(foreign_module())
        pipeline = relax.get_default_pipeline(target.target)
        executable = tvm.compile(mod, target.target, relax_pipeline=pipeline)
        self.machine = relax.VirtualMachine(executable, tvm.cpu())
        self.layout = KVLayout(LAYERS, KV_HEADS, DIM, kv.k_bits, kv.v_bits)
        self.cache = PagedKVCache(self.layout, 12, 3, 4)
        self.plan = StepPlan(self.cache, 256, 36, SPLIT_PAGES, 8, TILE_ROWS)
        self.state = self.machine["create_paged_kv_cache"](tvm.runtime.ShapeTuple([12, 3, 4]))
        self.scratch = tvm.runtime.tensor(np.zeros((8, HEADS, DIM + SCRATCH_EXTRA), np.float32))

    def step(self, requests: list[tuple[str, int]], qkv: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        plan = build_step(self.plan, requests, 2)
        n = plan.num_rows
        lists = {name: tvm.runtime.tensor(getattr(plan, name)) for name in CACHE_PARAMETERS[7:]}
        rows = {name: tvm.runtime.tensor(getattr(plan, name)[:n]) for name in CACHE_PARAMETERS[5:7]}
        before = [np.from_dlpack(x).ctypes.data for x in self.state]
        out, positions, state = self.machine["batch_decode"](
            tvm.runtime.tensor(qkv[:, None]), *self.state, self.scratch, tvm.runtime.tensor(plan.kv_faults),
            *rows.values(), *lists.values(), (),
        )  # fmt: skip
        assert [np.from_dlpack(x).ctypes.data for x in state] == before  # written in place
        plan.commit()
        return out.numpy()[:, 0], positions.numpy()


def foreign_oracle(qkv: np.ndarray) -> np.ndarray:
    """Twice the attention of one sequence (both layers see the same rows), float32."""
    n, half = len(qkv), ROTARY // 2
    frequency = THETA ** -(np.arange(half) / half) / 2
    angle = np.arange(n)[:, None, None] * frequency
    rotated = qkv.astype(np.float32)
    a, b = rotated[..., :half].copy(), rotated[..., half:ROTARY].copy()
    rotated[..., :half] = a * np.cos(angle) - b * np.sin(angle)
    rotated[..., half:ROTARY] = b * np.cos(angle) + a * np.sin(angle)
    q, k = rotated[:, :HEADS], np.repeat(rotated[:, HEADS : HEADS + KV_HEADS], HEADS // KV_HEADS, axis=1)
    v = np.repeat(qkv[:, HEADS + KV_HEADS :].astype(np.float32), HEADS // KV_HEADS, axis=1)
    scores = np.einsum("ihd,jhd->hij", q, k) * 0.125 + np.triu(np.full((n, n), -1e30), 1)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    return 2 * np.einsum("hij,jhd->ihd", weights / weights.sum(axis=2, keepdims=True), v)


@pytest.mark.parametrize(
    ("kv", "limit"), [("none", 2e-3), ("int8", 0.02), ("int4", 0.15), ("k=int4:v=int3", 0.3)]
)
def test_foreign_module_runs(kv, limit):
    """Two sequences, chunks across page boundaries and decode: the rewritten module against numpy."""
    rig = ForeignRig(KVQuantization.parse(kv), "O2")
    rng = np.random.default_rng(0)
    rows = {s: rng.standard_normal((150, HEADS + 2 * KV_HEADS, DIM)).astype(np.float16) for s in "ab"}
    found: dict[str, list[np.ndarray]] = {"a": [], "b": []}
    done = {"a": 0, "b": 0}
    for sequence in "ab":
        rig.cache.add_sequence(sequence)
    for requests in ([("a", 100)], [("b", 1), ("a", 40)], [("b", 129)], *[[("a", 1), ("b", 1)]] * 10):
        parts = [rows[s][done[s] : done[s] + count] for s, count in requests]
        out, positions = rig.step(requests, np.concatenate(parts))
        expected = np.concatenate([np.arange(done[s], done[s] + count) for s, count in requests])
        np.testing.assert_array_equal(positions, expected)
        at = 0
        for s, count in requests:
            found[s].append(out[at : at + count])
            at, done[s] = at + count, done[s] + count
    errors = []
    for s in "ab":
        expected = foreign_oracle(rows[s][: done[s]])
        errors.append(relative_error(np.concatenate(found[s]).astype(np.float32), expected))
    assert max(errors) < limit
    assert kv == "none" or max(errors) > 2e-3  # what was sealed was quantized, and was read
