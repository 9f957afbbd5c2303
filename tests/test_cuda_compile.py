"""Libraries for CUDA, compiled where there is no GPU."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import tvm

from kvq.compiler import compile_model
from kvq.compiler import fatbin as fatbin_module
from kvq.compiler.fatbin import compile_fatbin, embed_fatbin, find_nvcc
from kvq.compiler.target import DEFAULT_CUDA_ARCHS, cuda_target, target_for
from kvq.errors import CompileError, LibraryError
from kvq.gen_config import gen_config
from kvq.gpu_features import cuda_archs
from kvq.runtime.library import Library
from kvq.schedules.backend import RowSource
from kvq.schedules.cuda import weight_fragments
from kvq.schedules.cuda.linear_tiles import TileProduct
from kvq.schedules.cuda.tile_tuning import SOME_ROWS, tile_tuning
from tiny_llama import TinyLlama

_MAGIC = 0xBA55ED50
_PTX, _MACHINE_CODE = 1, 2


@pytest.fixture(scope="module")
def nvcc() -> str:
    try:
        return find_nvcc()
    except CompileError as error:
        pytest.skip(str(error))


def fatbin_entries(data: bytes) -> set[tuple[int, int]]:
    """``(kind, architecture)`` of everything in the fatbins of a file."""
    found, at = set(), data.find(struct.pack("<I", _MAGIC))
    while at >= 0:
        header, size = struct.unpack_from("<HQ", data, at + 6)
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, head, length = struct.unpack_from("<HHIQ", data, entry)
            found.add((kind, struct.unpack_from("<I", data, entry + 28)[0]))
            entry += head + length
        at = data.find(struct.pack("<I", _MAGIC), end)
    return found


def test_fatbin_holds_every_architecture(nvcc):
    source = 'extern "C" __global__ void add(float* x) { x[threadIdx.x] += 1.0f; }'
    entries = fatbin_entries(compile_fatbin(source, ("sm_90", "sm_80")))
    assert entries == {(_MACHINE_CODE, 80), (_MACHINE_CODE, 90), (_PTX, 90)}


def test_registers_hold_what_a_product_of_few_rows_has_under_way(nvcc, tmp_path):
    """In bf16 three tiles at a time did not fit, which was six times as slow."""
    target = cuda_target("sm_90a", "bfloat16")
    func = target.kernels.rounded.linear(6144, 4096, "int4", most_rows=4, rows=RowSource(False, 1e-5))
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    built = tvm.compile(module, target=target.target, tir_pipeline=target.tir_pipeline)
    source = tmp_path / "kernel.cu"
    source.write_text(built.mod.imports[0].inspect_source("cuda"))
    command = [
        nvcc,
        "-arch=sm_90a",
        "-O3",
        "-cubin",
        "-Xptxas",
        "-v",
        "-o",
        str(tmp_path / "out"),
        str(source),
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert re.findall(r"(\d+) bytes spill stores", said) == ["0"]


def test_errors_of_nvcc_are_one_line(nvcc):
    with pytest.raises(CompileError, match=r"could not compile the kernels: .*error.*nonsense") as caught:
        compile_fatbin("__global__ void f() { nonsense; }", ("sm_80",))
    assert "\n" not in str(caught.value)


#: What makes a Gemma of a Llama.
_GEMMA = {
    "model_type": "gemma2",
    "hidden_act": "gelu_pytorch_tanh",
    "norm_placement": "both",
    "embedding_scale": 8.0,
}


@pytest.mark.parametrize(
    ("quantization", "kv", "page", "archs", "fields", "activations"),
    [
        ("q4f16_1", "int4", 64, ["sm_90a"], {}, "float16"),
        ("q0f32", "none", 64, ["sm_80", "sm_90"], {}, "float32"),
        ("q0f16", "k=int3:v=int8", 128, ["sm_80"], _GEMMA, "bfloat16"),
    ],
)
def test_a_model_compiles_without_a_gpu(nvcc, tmp_path, quantization, kv, page, archs, fields, activations):
    """All kernels of a model, for Ampere and Hopper, in a library that says what it is."""
    TinyLlama(seed=3, bias=quantization == "q0f16", intermediate_size=256).write(tmp_path / "model")
    config = gen_config(tmp_path / "model", quantization, tmp_path / "out", kv_quantization=kv)
    config.model = config.model.model_copy(update=fields)
    config.save(tmp_path / "out")
    numbers = [int(arch[3:5]) for arch in archs]
    library = compile_model(
        tmp_path / "out", tmp_path / "lib.so", device="cuda", cuda_arch=",".join(reversed(archs)),
        overrides=f"page_size={page}",
    )  # fmt: skip
    data = library.read_bytes()
    ptx = {(_PTX, numbers[-1])} if archs[-1][-1].isdigit() else set()
    assert fatbin_entries(data) == {*((_MACHINE_CODE, number) for number in numbers), *ptx}
    assert b"__global__" not in data and f'"archs": {json.dumps(archs)}'.encode() in data
    assert f'"activations": "{activations}"'.encode() in data
    assert (b"silu_gated_linear" in data) is (archs == ["sm_90a"])
    assert (b"linear_bf16_float16" in data) is (activations == "bfloat16")
    with pytest.raises(LibraryError, match="compiled for cuda, not cpu: use --device cuda"):
        Library.load(library)


def test_the_runtime_alone_reads_the_library(nvcc, tmp_path):
    """Without a GPU there is one line to say so, also where TVM has no compiler."""
    code = (
        "from kvq.runtime.library import Library\n"
        "from kvq.errors import LibraryError\n"
        f"try: Library.load({str(Path(__file__))!r}, 'cuda')\n"
        "except LibraryError as error: print(error)\n"
    )
    environment = {"TVM_USE_RUNTIME_LIB": "1", "PYTHONPATH": ":".join(sys.path), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("device 'cuda' cannot be used: ") and done.stdout.count("\n") == 1


@pytest.mark.parametrize("archs", ["sm_75", "hopper", "sm_80,90", ""])
def test_bad_architectures(archs):
    with pytest.raises(CompileError, match=r"--cuda-arch .* cannot be compiled for: use sm_80"):
        cuda_target(archs)


def test_architectures_are_sorted_and_local_ones_are_the_default(monkeypatch):
    assert cuda_target("sm_90a,sm_100,sm_80").archs == ("sm_80", "sm_90a", "sm_100")
    monkeypatch.setattr("kvq.compiler.target.cuda_archs", lambda: ("sm_86",))
    assert target_for("cuda", "O2").description == {"kind": "cuda", "archs": ["sm_86"]}
    monkeypatch.setattr("kvq.compiler.target.cuda_archs", lambda: ())
    assert cuda_target().archs == DEFAULT_CUDA_ARCHS
    with pytest.raises(CompileError, match="--cuda-arch goes with --device cuda"):
        target_for("cpu", "O2", "sm_80")


def test_a_local_hopper_gets_code_of_its_own(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 8.9\necho 9.0\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert cuda_archs.__wrapped__() == ("sm_89", "sm_90a")


@pytest.mark.parametrize("archs", [["sm_89"], ["sm_80", "sm_89", "sm_90"], ["sm_90"], ["sm_90a"]], ids=str)
def test_tiles_fit_the_shared_memory_of_every_gpu(archs):
    limit = (227 if min(archs) >= "sm_90" else 99) << 10
    for n_out, most_rows, storage in product(
        (576, 4096, 6144, 28672), (SOME_ROWS, None), weight_fragments.KINDS
    ):
        tuning = tile_tuning(n_out, storage, most_rows, archs)
        assert TileProduct(n_out, 4096, storage, tuning).shared_bytes <= limit
        assert tuning.stages >= (3 if tuning.wgmma else 2)


def test_without_nvcc_there_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(fatbin_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CompileError, match=r"no nvcc .* pip install 'kvq\[gpu\]', or set CUDA_HOME"):
        find_nvcc()
    home = tmp_path / "toolkit" / "bin"
    home.mkdir(parents=True)
    (home / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(home.parent))
    assert find_nvcc() == str(home / "nvcc")


def test_only_the_source_in_the_imports_is_replaced(monkeypatch):
    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    def blob(content: bytes) -> bytes:
        tree = struct.pack("<5Q", 2, 0, 1, 1, 1)
        body = tree + text(b"_lib") + text(b"other") + text(b"same") + text(b"cuda") + text(content)
        return struct.pack("<Q", len(body)) + body

    types = struct.pack("<Q3I", 3, 1, 2, 3)
    function = text(b"f") + text(b"f") + types + struct.pack("<Q", 1) + text(b"threadIdx.x") + types
    functions = struct.pack("<Q", 1) + function
    monkeypatch.setattr(fatbin_module, "compile_fatbin", lambda source, archs: source.upper().encode())
    source, binary = (
        text(kind) + functions + text(code) for kind, code in ((b"cuda", b"abc"), (b"cubin", b"ABC"))
    )
    assert embed_fatbin(blob(source), ("sm_80",)) == blob(binary)
    assert embed_fatbin(blob(binary), ("sm_80",)) == blob(binary)
