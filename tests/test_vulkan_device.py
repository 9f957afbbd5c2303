"""kvq-vulkan's runtime: memory, order of commands, limits, and devices that are not there or go away."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

import vulkan_runner
from kvq.compiler.gpu_target import GpuTarget
from kvq.errors import LibraryError
from kvq.runtime.device import Device
from kvq.runtime.dlpack_view import Int32View
from kvq.schedules.gpu.block import ATTRIBUTES, launch, shared, sync
from kvq.schedules.gpu.limits import GpuLimits
from kvq.schedules.statements import put, when

kvq_vulkan = pytest.importorskip("kvq_vulkan", reason="kvq-vulkan is not installed")

pytestmark = [
    pytest.mark.vulkan,
    pytest.mark.skipif(vulkan_runner.missing() is not None, reason=str(vulkan_runner.missing())),
]

THREADS = 64
#: Where Debian's packages have the validation layer.
_LAYER = Path("/usr/share/vulkan/explicit_layer.d/VkLayer_khronos_validation.json")


def add_function(dtype: str = "float32", shared_words: int = 0) -> Any:
    """``out[i] = x[i] + y`` in a type, with so much shared memory that it must pass through."""
    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        n = IRBuilder.name("n", T.int64())
        x = builder.arg("x", T.Buffer((n,), dtype))
        y = builder.arg("y", T.float32())
        out = builder.arg("out", T.Buffer((n,), dtype))
        count = T.bind(T.cast(n, "int32"))
        with launch([T.ceildiv(count, THREADS)], THREADS) as (block, thread):
            i = T.bind(block * THREADS + thread)
            if shared_words:
                passed = shared((shared_words,), "float32")
                put(passed, y, shared_words - 1 - thread)
                sync()
                y = passed[shared_words - THREADS + thread]
            when(i < count, lambda: put(out, x[i] + T.cast(y, dtype), i))
    return script.get()


def target() -> GpuTarget:
    return GpuTarget("vulkan", GpuLimits(threads=256, shared_bytes=32768))


@cache
def add() -> Any:
    return vulkan_runner.build(add_function(), target())


def on_device(array: np.ndarray) -> Any:
    return tvm.runtime.tensor(array, vulkan_runner.device())


def test_copies_of_all_sizes() -> None:
    """To the device, within it and back: whole tensors and views, more than a staging buffer holds."""
    for size in (1, 1000, (4 << 20) // 4 * 3 + 5):
        array = np.arange(size, dtype=np.int32)
        first = on_device(array)
        second = tvm.runtime.empty((size,), "int32", vulkan_runner.device())
        first.copyto(second)
        np.testing.assert_array_equal(second.numpy(), array)
    half = second._create_view((size // 2,), relative_byte_offset=1024)
    half.copyfrom(-array[: size // 2])
    expected = array.copy()
    expected[256 : 256 + size // 2] = -array[: size // 2]
    np.testing.assert_array_equal(second.numpy(), expected)
    np.testing.assert_array_equal(half.numpy(), -array[: size // 2])


def test_launches_see_what_came_before() -> None:
    """A chain of more launches than a batch takes, uploads between them, buffers freed while they run."""
    x = np.random.default_rng(0).integers(0, 99, 5000).astype(np.float32)
    a, total = on_device(x), 0
    for step in range(300):
        b = tvm.runtime.empty(x.shape, "float32", vulkan_runner.device())
        add()(a, step, b)
        total += step
        if step % 70 == 69:  # what was queued reads the old values
            add()(a, step, b)
            a.copyfrom(np.zeros_like(x))
        a = b
    np.testing.assert_array_equal(a.numpy(), x + total)


def test_views_are_arguments() -> None:
    """A kernel on views of one buffer, as the step's tensors are; a start that no device takes is refused."""
    func = vulkan_runner.build(add_function("int32"), target())
    buffer = on_device(np.arange(512, dtype=np.int32))
    x, out, odd = (Int32View(buffer, start, (128,)) for start in (256, 64, 1))
    func(x.tensor, 7, out.tensor)
    np.testing.assert_array_equal(buffer.numpy()[64:192], np.arange(256, 384) + 7)
    np.testing.assert_array_equal(buffer.numpy()[192:], np.arange(192, 512))
    with pytest.raises(RuntimeError, match="minStorageBufferOffsetAlignment"):
        func(odd.tensor, 7, out.tensor)


def test_a_buffer_too_large() -> None:
    limit = kvq_vulkan.limits(0)["buffer_bytes"]
    with pytest.raises(RuntimeError, match=rf"at most {limit} bytes \(maxStorageBufferRange\)"):
        tvm.runtime.empty((limit + 4,), "uint8", vulkan_runner.device())


def test_numbers_beyond_32_bits() -> None:
    """Kernels compute indices in 32 bits: sizes that do not fit are refused, not cut."""
    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        number = builder.arg("number", T.int64())
        out = builder.arg("out", T.Buffer((THREADS,), "int32"))
        with launch([1], THREADS) as (_, thread):
            put(out, T.cast(number, "int32"), thread)
    func = vulkan_runner.build(script.get(), target())
    out = on_device(np.zeros(THREADS, np.int32))
    func(-7, out)
    np.testing.assert_array_equal(out.numpy(), -7)
    with pytest.raises(RuntimeError, match="does not fit in 32 bits"):
        func(1 << 40, out)


def test_attributes() -> None:
    device, limits = vulkan_runner.device(), kvq_vulkan.limits(0)
    assert device.exist and not tvm.device("vulkan", 99).exist
    assert device.max_threads_per_block == limits["threads"] >= 128
    assert device.max_shared_memory_per_block == limits["shared_bytes"] >= 16384
    assert device.multi_processor_count >= 1
    free = device.available_global_memory
    kept = on_device(np.zeros(1 << 20, np.float32))
    assert 0 < device.available_global_memory <= free <= device.total_global_memory
    del kept


def test_names_of_devices() -> None:
    assert Device.open("vulkan").handle == Device.open("vulkan:0").handle == vulkan_runner.device()
    name = kvq_vulkan.limits(0)["name"]
    with pytest.raises(LibraryError, match="no device 'vulkan:99'") as caught:
        Device.open("vulkan:99")
    assert f"vulkan:0 is {name}" in str(caught.value)
    with pytest.raises(LibraryError, match="use vulkan or, of several, vulkan:1"):
        Device.open("vulkan:x")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of libraries: of fp32, of fp16, with shared memory."""
    directory = tmp_path_factory.mktemp("libraries")
    kernels = {"float32": {}, "float16": {"dtype": "float16"}, "shared": {"shared_words": 4096}}
    for name, options in kernels.items():
        module = tvm.IRModule({"main": add_function(**options).with_attr("global_symbol", "main")})
        built = tvm.compile(module, target=target().target, tir_pipeline=target().tir_pipeline)
        built.export_library(str(directory / f"{name}.so"))
    return directory


_RUN = """
import sys
import numpy as np
import tvm
import kvq_vulkan

kvq_vulkan.register()
assert tvm._RUNTIME_ONLY
device = tvm.device("vulkan", 0)
module = tvm.runtime.load_module(sys.argv[1])
kvq_vulkan.check(module)
x = tvm.runtime.tensor(np.ones(200, "float16" if "float16" in sys.argv[1] else "float32"), device)
module["main"](x, 1.0, x)
assert (x.numpy() == 2).all()
print("ran")
"""


def runtime_only(library: Path, more: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a library in a process of its own, on TVM's runtime without the compiler."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    settings = {"PYTHONPATH": path, "TVM_USE_RUNTIME_LIB": "1", **environment}
    command = [sys.executable, "-c", _RUN + more, str(library)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **settings}, check=False
    )


def test_a_second_process_and_the_validation_layer(libraries: Path) -> None:
    """Two processes share a device; the layer has nothing to say about how it is used."""
    x = on_device(np.ones(100, np.float32))
    layers = {"VK_INSTANCE_LAYERS": "VK_LAYER_KHRONOS_validation"} if _LAYER.exists() else {}
    for library in sorted(libraries.iterdir()):
        done = runtime_only(library, **layers)
        assert "ran" in done.stdout, done.stderr
        assert "Validation" not in done.stdout + done.stderr
    add()(x, 1.0, x)
    np.testing.assert_array_equal(x.numpy(), 2)


@pytest.mark.parametrize(
    ("limits", "library", "message"),
    [
        ("float16=0", "float16", "needs fp16 arithmetic (shaderFloat16), which it has not"),
        ("storage16=0", "float16", "(storageBuffer16BitAccess), which it has not"),
        ("threads=32", "float32", "64 threads a workgroup (maxComputeWorkGroupInvocations), it has 32"),
        ("shared_bytes=8192", "shared", "needs 16384 bytes of shared memory"),
        ("storage_buffers=1", "float32", "needs 2 storage buffers"),
        ("push_bytes=4", "float32", "needs 8 bytes of push constants (maxPushConstantsSize), it has 4"),
    ],
)
def test_a_device_that_cannot(limits: str, library: str, message: str, libraries: Path) -> None:
    """What a library needs and a device has not is refused in one line that names the limit."""
    done = runtime_only(libraries / f"{library}.so", KVQ_VULKAN_LIMITS=limits)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: vulkan:0 (") and "kernel main_kernel " in last
    assert message in last


def test_a_device_without_fp16_runs_what_needs_none(libraries: Path) -> None:
    done = runtime_only(libraries / "float32.so", KVQ_VULKAN_LIMITS="float16=0,storage16=0,storage8=0")
    assert "ran" in done.stdout, done.stderr


_LOSE = """
import tvm_ffi

tvm_ffi.get_global_func("kvq_vulkan.lose_device")(0)
for use in (lambda: module["main"](x, 1.0, x), x.numpy, lambda: tvm.runtime.empty((4,), "int32", device)):
    try:
        use()
    except RuntimeError as error:
        print(error)
del x
print("alive")
"""


def test_a_lost_device_is_an_error(libraries: Path) -> None:
    """It ends what uses the device, with one line, and nothing else; memory can still be given back."""
    done = runtime_only(libraries / "float32.so", _LOSE)
    assert done.stdout.count("was lost") == 3 and "alive" in done.stdout, done.stderr


_TWO = """
import sys
import numpy as np
import tvm
import kvq_vulkan

first, second = tvm.device("vulkan", 0), tvm.device("vulkan", 1)
assert kvq_vulkan.num_devices() == 2
add = tvm.runtime.load_module(sys.argv[1])["main"]
x = tvm.runtime.tensor(np.ones(100, "float32"), second)
y = tvm.runtime.tensor(np.zeros(100, "float32"), first)
add(x, 1.0, x)
add(y, 5.0, y)
assert (x.numpy() == 2).all() and (y.numpy() == 5).all()
x.copyto(y)
add(y, 1.0, y)
assert (y.numpy() == 3).all()
print("ran")
"""


def test_two_devices(libraries: Path, tmp_path: Path) -> None:
    """One library on both, and a copy from one to the other: lavapipe twice, as two drivers."""
    manifest = Path("/usr/share/vulkan/icd.d/lvp_icd.x86_64.json")
    if not manifest.exists():
        pytest.skip("no lavapipe")
    other = tmp_path / "other_icd.json"
    other.write_text(manifest.read_text())
    drivers = f"{manifest}:{other}"
    path = os.pathsep.join(filter(None, sys.path))
    settings = {"PYTHONPATH": path, "VK_DRIVER_FILES": drivers, "VK_ICD_FILENAMES": drivers}
    command = [sys.executable, "-c", _TWO, str(libraries / "float32.so")]
    environment = {**os.environ, **settings, "TVM_USE_RUNTIME_LIB": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "ran" in done.stdout, done.stderr


def test_no_driver() -> None:
    """Where there is no driver, that is what is said."""
    code = "import kvq_vulkan\nprint(kvq_vulkan.num_devices(), kvq_vulkan.problem())"
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TVM_USE_RUNTIME_LIB": "1"}
    nowhere = {"VK_DRIVER_FILES": "/nonexistent", "VK_ICD_FILENAMES": "/nonexistent"}
    environment = {**os.environ, **settings, **nowhere}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.startswith("0 no Vulkan driver is installed"), done.stdout
