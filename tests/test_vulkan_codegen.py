"""kvq-vulkan's code generator: each kind of node computes what numpy does, in valid SPIR-V."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

import vulkan_runner
from kvq.schedules.gpu.block import ATTRIBUTES, launch, local, shared, sync
from kvq.schedules.statements import put, run, when

kvq_vulkan = pytest.importorskip("kvq_vulkan", reason="kvq-vulkan is not installed")

pytestmark = pytest.mark.vulkan

#: Elements of the tests' buffers, and threads of their workgroups.
COUNT, THREADS = 128, 32


@pytest.fixture(scope="module", autouse=True)
def device() -> Any:
    if (reason := vulkan_runner.missing()) is not None:
        pytest.skip(reason)
    return vulkan_runner.device()


def compiled(dtypes: list[str], body: Callable[..., None], subgroup: int = 1) -> Any:
    """A kernel on buffers of ``COUNT`` elements; ``body(buffers, i, thread)`` is what each thread does."""
    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        buffers = [builder.arg(f"b{n}", T.Buffer((COUNT,), dtype)) for n, dtype in enumerate(dtypes)]
        with launch([COUNT // THREADS], THREADS) as (block, thread):
            body(buffers, T.bind(block * THREADS + thread), thread)
    return build(script.get(), subgroup)


def build(func: Any, subgroup: int = 1) -> Any:
    """Compile for a device whose subgroups have so many lanes, if any."""
    target = tvm.target.Target({"kind": "vulkan", "thread_warp_size": subgroup}, host={"kind": "llvm"})
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    built = tvm.compile(module, target=target, tir_pipeline="tirx")
    vulkan_runner.validate(built.mod)
    return built["main"]


def ran(func: Any, arrays: list[np.ndarray], device: Any) -> list[np.ndarray]:
    """What the buffers hold after a run."""
    tensors = [tvm.runtime.tensor(array, device) for array in arrays]
    func(*tensors)
    return [tensor.numpy() for tensor in tensors]


def numbers(dtype: str) -> np.ndarray:
    """Values of a type: small ones, large ones, negative ones."""
    rng = np.random.default_rng(5)
    if dtype.startswith("float"):
        return (rng.standard_normal(COUNT) * np.exp(rng.uniform(-3, 3, COUNT))).astype(dtype)
    info = np.iinfo(dtype)
    values = rng.integers(info.min, info.max, COUNT, dtype, endpoint=True)
    values[:COUNT:2] = rng.integers(max(info.min, -9), 9, COUNT // 2)
    return values


def nonzero(values: np.ndarray) -> np.ndarray:
    return np.where(values == 0, values.dtype.type(3), values)


INTEGER: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [
    ("arithmetic", lambda a, b: (a + b) * a - b, lambda a, b: (a + b) * a - b),
    ("bits", lambda a, b: ((a & b) | (~a)) ^ (b | 5), lambda a, b: ((a & b) | (~a)) ^ (b | 5)),
    ("shift left", lambda a, b: a << (b & 7), lambda a, b: a << (b & 7)),
    ("shift right", lambda a, b: a >> (b & 7), lambda a, b: a >> (b & 7)),
    ("minmax", lambda a, b: T.max(T.min(a, b), a - b), lambda a, b: np.maximum(np.minimum(a, b), a - b)),
    ("floordiv", lambda a, b: T.floordiv(a, b), lambda a, b: a // b),
    ("floormod", lambda a, b: T.floormod(a, b), lambda a, b: a % b),
    ("select", lambda a, b: T.Select(a < b, a, b - a), lambda a, b: np.where(a < b, a, b - a)),
]


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_integers(dtype: str, device: Any) -> None:
    """All operators of integers, signed ones floored as TIR says."""
    a, b = numbers(dtype), nonzero(numbers(dtype)[::-1].copy())
    a, b = np.where(a == np.iinfo(dtype).min, 1, a).astype(dtype), b

    def body(buffers: Any, i: Any, _: Any) -> None:
        for n, (_name, expression, _reference) in enumerate(INTEGER):
            put(buffers[2 + n], expression(buffers[0][i], buffers[1][i]), i)

    func = compiled([dtype] * (2 + len(INTEGER)), body)
    found = ran(func, [a, b, *(np.zeros(COUNT, dtype) for _ in INTEGER)], device)[2:]
    for (name, _, reference), got in zip(INTEGER, found, strict=True):
        np.testing.assert_array_equal(got, reference(a, b).astype(dtype), err_msg=name)


def test_truncated_division(device: Any) -> None:
    """C's division and remainder, of negative numbers too: Vulkan's remainder leaves those open."""
    a, b = numbers("int32"), nonzero(numbers("int32")[::-1].copy())

    def body(buffers: Any, i: Any, _: Any) -> None:
        put(buffers[2], T.truncdiv(buffers[0][i], buffers[1][i]), i)
        put(buffers[3], T.truncmod(buffers[0][i], buffers[1][i]), i)

    zeros = np.zeros(COUNT, np.int32)
    *_, quotient, remainder = ran(compiled(["int32"] * 4, body), [a, b, zeros, zeros], device)
    np.testing.assert_array_equal(quotient, np.trunc(a.astype(np.float64) / b).astype(np.int32))
    np.testing.assert_array_equal(remainder, np.fmod(a, b))


CASTS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "float32"]


@pytest.mark.parametrize("source", CASTS)
def test_casts(source: str, device: Any) -> None:
    """From each type to each, as numpy converts; what an integer cannot hold is left out."""
    values = numbers(source)
    if source.startswith("float"):
        values = np.clip(np.abs(values), 0, 120).astype(source)  # what every integer type holds

    def body(buffers: Any, i: Any, _: Any) -> None:
        for target, buffer in zip(CASTS, buffers[1:], strict=True):
            put(buffer, T.cast(buffers[0][i], target), i)

    found = ran(compiled([source, *CASTS], body), [values, *(np.zeros(COUNT, t) for t in CASTS)], device)[1:]
    for target, got in zip(CASTS, found, strict=True):
        with np.errstate(over="ignore"):
            expected = values.astype(target)
        np.testing.assert_array_equal(got, expected, err_msg=target)


FUNCTIONS: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [
    ("exp", T.exp, np.exp),
    ("exp2", T.exp2, np.exp2),
    ("log", lambda x: T.log(T.fabs(x)), lambda x: np.log(np.abs(x))),
    ("log2", lambda x: T.log2(T.fabs(x)), lambda x: np.log2(np.abs(x))),
    ("sqrt", lambda x: T.sqrt(T.fabs(x)), lambda x: np.sqrt(np.abs(x))),
    ("rsqrt", lambda x: T.rsqrt(T.fabs(x)), lambda x: 1 / np.sqrt(np.abs(x))),
    ("sin", T.sin, np.sin),
    ("cos", T.cos, np.cos),
    ("tanh", T.tanh, np.tanh),
    ("pow", lambda x: T.pow(T.fabs(x), T.float32(1.5)), lambda x: np.abs(x) ** 1.5),
    ("sigmoid", T.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    ("floor", T.floor, np.floor),
    ("ceil", T.ceil, np.ceil),
    ("trunc", T.trunc, np.trunc),
    ("nearbyint", T.nearbyint, np.rint),
]


def test_functions(device: Any) -> None:
    """Functions of floats, as exact as Vulkan promises."""
    x = np.clip(numbers("float32"), -9, 9)
    x[0] = 2.5  # ties go to even

    def body(buffers: Any, i: Any, _: Any) -> None:
        for (_name, expression, _reference), buffer in zip(FUNCTIONS, buffers[1:], strict=True):
            put(buffer, expression(buffers[0][i]), i)

    zeros = [np.zeros(COUNT, np.float32) for _ in FUNCTIONS]
    found = ran(compiled(["float32"] * (1 + len(FUNCTIONS)), body), [x, *zeros], device)[1:]
    for (name, _, reference), got in zip(FUNCTIONS, found, strict=True):
        np.testing.assert_allclose(got, reference(x.astype(np.float64)), 2e-5, 2e-6, err_msg=name)


def test_half_precision(device: Any) -> None:
    """Arithmetic of fp16, and fp32 rounded to fp16: to even, subnormals and infinities kept."""
    a, b = numbers("float16"), numbers("float16")[::-1].copy()
    wide = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, 3e-8, 6e-8, np.inf, -0.0] * 16, np.float32)

    def body(buffers: Any, i: Any, _: Any) -> None:
        put(buffers[2], buffers[0][i] * buffers[1][i] + T.float16(0.5), i)
        put(buffers[4], T.cast(buffers[3][i], "float16"), i)

    def chosen(buffers: Any, i: Any, _: Any) -> None:
        put(buffers[1], T.if_then_else(i % 3 == 0, buffers[0][i], buffers[0][0]), i)

    func = compiled(["float16", "float16", "float16", "float32", "float16"], body)
    half = np.zeros(COUNT, np.float16)
    _, found = ran(compiled(["float16", "float16"], chosen), [a, half], device)
    np.testing.assert_array_equal(found, np.where(np.arange(COUNT) % 3 == 0, a, a[0]))
    _, _, product, _, rounded = ran(func, [a, b, half, wide, half], device)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(product.astype(np.float32), a * b + np.float16(0.5), 2e-3, 2e-3)
        np.testing.assert_array_equal(rounded.view(np.uint16), wide.astype(np.float16).view(np.uint16))


def test_bits_of_floats(device: Any) -> None:
    """Reinterpretation keeps every bit, of NaN too; NaN differs from itself; popcount and leading zeros."""
    x = numbers("float32")
    x[:3] = np.nan, np.inf, -0.0
    words = numbers("uint32")

    def body(buffers: Any, i: Any, _: Any) -> None:
        put(buffers[1], T.reinterpret("uint32", buffers[0][i]), i)
        put(
            buffers[2], T.Select(T.isnan(buffers[0][i]), 1, T.Select(buffers[0][i] != buffers[0][i], 2, 0)), i
        )
        put(buffers[4], T.popcount(buffers[3][i]), i)
        put(buffers[5], T.clz(T.cast(buffers[3][i], "int32")), i)
        put(buffers[6], T.max(buffers[0][i], T.float32(-100)), i)

    func = compiled(["float32", "uint32", "int32", "uint32", "uint32", "int32", "float32"], body)
    zeros = [np.zeros(COUNT, t) for t in ("uint32", "int32", "uint32", "uint32", "int32", "float32")]
    arrays = [x, zeros[0], zeros[1], words, zeros[3], zeros[4], zeros[5]]
    _, bits, nan, _, ones, leading, largest = ran(func, arrays, device)
    np.testing.assert_array_equal(bits, x.view(np.uint32))
    np.testing.assert_array_equal(nan, np.isnan(x))
    np.testing.assert_array_equal(ones, [bin(int(w)).count("1") for w in words])
    np.testing.assert_array_equal(leading, [32 - int(w).bit_length() for w in words])
    np.testing.assert_array_equal(largest, np.fmax(x, np.float32(-100)))


def test_control_flow(device: Any) -> None:
    """Loops with bounds of their own, while, nested conditions, and loads that a condition guards."""
    a = np.abs(numbers("int32")) % 40

    def body(buffers: Any, i: Any, _: Any) -> None:
        total = local((1,), "int32")
        put(total, 0, 0)
        with T.serial(3, buffers[0][i] + 3) as j, T.If(j % 2 == 0):
            with T.Then():
                put(total, total[0] + j, 0)
            with T.Else():
                when(j % 3 == 0, lambda: put(total, total[0] - 2 * j, 0))
        with T.While(total[0] > 50):
            put(total, total[0] - 7, 0)
        far = buffers[0][i] * 1000000  # nothing is there
        guarded = T.if_then_else(i < 0, buffers[0][far], 1)
        both = tvm.tirx.all(i < 0, buffers[0][far] > 0)
        put(buffers[1], total[0] + guarded + T.Select(both, 5, 0), i)

    _, found = ran(compiled(["int32", "int32"], body), [a, np.zeros(COUNT, np.int32)], device)
    for value, got in zip(a, found, strict=True):
        total = sum(j if j % 2 == 0 else (-2 * j if j % 3 == 0 else 0) for j in range(3, value + 3))
        while total > 50:
            total -= 7
        assert got == total + 1


def test_vectors(device: Any) -> None:
    """Ramps that are loaded, computed with and stored; broadcasts, vectors of conditions, strides."""
    x = numbers("float32")

    def body(buffers: Any, i: Any, thread: Any) -> None:
        values = local((4,), "float32")
        at = (i // 4) * 4

        def whole() -> None:
            loaded = T.bind(buffers[0][run(at, 4)])
            put(values, T.max(loaded * T.broadcast(T.float32(2), 4), loaded), run(0, 4))
            put(buffers[1], values[T.ramp(3, -1, 4)], run(at, 4))

        when(thread % 4 == 0, whole)

    _, found = ran(compiled(["float32", "float32"], body), [x, np.zeros_like(x)], device)
    np.testing.assert_array_equal(found, np.maximum(2 * x, x).reshape(-1, 4)[:, ::-1].reshape(-1))


def test_workgroup_memory(device: Any) -> None:
    """What a thread writes before a barrier, the others see behind it."""
    x = numbers("int32")

    def body(buffers: Any, i: Any, thread: Any) -> None:
        values = shared((THREADS,), "int32")
        put(values, buffers[0][i], thread)
        sync()
        put(buffers[1], values[THREADS - 1 - thread], i)

    _, found = ran(compiled(["int32", "int32"], body), [x, np.zeros_like(x)], device)
    np.testing.assert_array_equal(found, x.reshape(-1, THREADS)[:, ::-1].reshape(-1))


@pytest.mark.parametrize("lanes", [2, 4])
def test_runs_of_workgroup_memory(lanes: int, device: Any) -> None:
    """Memory of which runs are loaded is of vectors; elements are stored and loaded one by one as well."""
    x = numbers("float32")

    def body(buffers: Any, i: Any, thread: Any) -> None:
        values = shared((THREADS,), "float32")
        put(values, buffers[0][i], thread)
        sync()
        start = T.bind((THREADS // lanes - 1 - thread // lanes) * lanes)
        loaded = T.bind(values[run(start, lanes)])
        put(buffers[1], T.Shuffle([loaded], [lanes - 1]), i)
        put(buffers[2], values[(thread + 1) % THREADS], i)
        crossing = T.bind(values[run((thread // 2) % (THREADS - lanes), lanes)])  # may lie across vectors
        put(buffers[3], T.Shuffle([crossing], [1]), i)

    _, last, following, crossing = ran(compiled(["float32"] * 4, body), [x, x * 0, x * 0, x * 0], device)
    rows, thread = x.reshape(-1, THREADS), np.arange(THREADS)
    start = (THREADS // lanes - 1 - thread // lanes) * lanes
    np.testing.assert_array_equal(last.reshape(rows.shape), rows[:, start + lanes - 1])
    np.testing.assert_array_equal(following.reshape(rows.shape), np.roll(rows, -1, axis=1))
    np.testing.assert_array_equal(crossing.reshape(rows.shape), rows[:, thread // 2 % (THREADS - lanes) + 1])


def test_products_and_sums(device: Any) -> None:
    """They become one instruction, whichever side the product is on."""
    a, b, c = (np.random.default_rng(seed).standard_normal(COUNT).astype(np.float32) for seed in range(3))

    def body(buffers: Any, i: Any, _: Any) -> None:
        x, y, z = (buffers[n][i] for n in range(3))
        for n, value in enumerate((x * y + z, z + x * y, x * y - z, z - x * y)):
            put(buffers[3 + n], value, i)

    found = ran(compiled(["float32"] * 7, body), [a, b, c, *[a * 0] * 4], device)[3:]
    wide, product = c.astype(np.float64), a.astype(np.float64) * b
    for got, expected in zip(
        found, (product + wide, wide + product, product - wide, wide - product), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=2e-7)


def test_subgroups(device: Any) -> None:
    """Shuffles exchange registers of a subgroup, where the target says how many lanes it has."""
    lanes = kvq_vulkan.limits(0)["subgroup"]
    if lanes not in (8, 16, 32) or THREADS % lanes:
        pytest.skip("the device has no subgroups of this test")
    x = numbers("float32")

    def body(buffers: Any, i: Any, _: Any) -> None:
        everyone = T.uint32(0xFFFFFFFF)
        swapped = T.tvm_warp_shuffle_xor(everyone, buffers[0][i], 1, lanes, lanes)
        put(buffers[1], swapped, i)
        put(buffers[2], T.tvm_warp_shuffle(everyone, buffers[0][i], 3, lanes, lanes), i)

    _, swapped, third = ran(compiled(["float32"] * 3, body, lanes), [x, x * 0, x * 0], device)
    np.testing.assert_array_equal(swapped, x.reshape(-1, 2)[:, ::-1].reshape(-1))
    np.testing.assert_array_equal(third, np.repeat(x.reshape(-1, lanes)[:, 3], lanes))


def test_what_cannot_be_said() -> None:
    """A kernel that is not supported is named, with what it says."""

    def body(buffers: Any, i: Any, _: Any) -> None:
        put(buffers[1], T.erf(buffers[0][i]), i)

    with pytest.raises(RuntimeError, match=r"kernel main_kernel: function erff? is not supported"):
        compiled(["float32", "float32"], body)


def test_library_on_disk(tmp_path: Path, device: Any) -> None:
    """SPIR-V goes into the library and comes out of it."""

    def body(buffers: Any, i: Any, _: Any) -> None:
        put(buffers[1], buffers[0][i] + 1, i)

    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        buffers = [builder.arg(f"b{n}", T.Buffer((COUNT,), "int32")) for n in range(2)]
        with launch([COUNT // THREADS], THREADS) as (block, thread):
            body(buffers, block * THREADS + thread, thread)
    target = tvm.target.Target({"kind": "vulkan"}, host={"kind": "llvm"})
    module = tvm.IRModule({"main": script.get().with_attr("global_symbol", "main")})
    tvm.compile(module, target=target, tir_pipeline="tirx").export_library(str(tmp_path / "lib.so"))
    loaded = tvm.runtime.load_module(str(tmp_path / "lib.so"))
    kvq_vulkan.check(loaded)
    x = numbers("int32")
    _, found = ran(loaded["main"], [x, np.zeros_like(x)], device)
    np.testing.assert_array_equal(found, x + 1)
