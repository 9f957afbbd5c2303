"""Libraries for OpenCL and WebGPU, made where there is no such GPU; and what cannot be compiled."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kvq.compiler import compile_model
from kvq.compiler import gpu_target as module
from kvq.compiler.gpu_target import GPU_LIMITS, gpu_target
from kvq.errors import CompileError
from kvq.gen_config import gen_config
from kvq.layout import KVLayout
from tiny_families import FAMILY_CASES, golden
from tiny_llama import TinyLlama


@pytest.fixture
def library(tmp_path):
    """Compiles a tiny model; the library as text, of which the sources of its kernels are a part."""

    def compiled(kind: str, quantization: str, kv: str, family: str | None = None) -> str:
        if family is None:
            TinyLlama(seed=3).write(tmp_path / "model")
        else:
            FAMILY_CASES[family].write(tmp_path / "model", golden(family)[1])
        gen_config(tmp_path / "model", quantization, tmp_path / "out", kv_quantization=kv)
        return compile_model(tmp_path / "out", tmp_path / "lib.so", device=kind).read_bytes().decode("latin1")

    return compiled


@pytest.mark.parametrize(
    ("quantization", "kv", "family"), [("q4f16_1", "int4", None), ("q0f32", "none", "qwen3_moe")]
)
def test_webgpu_within_its_limits(library, quantization, kv, family):
    """No number that WGSL lacks, and no more threads, shared memory and buffers than the target promises."""
    text, limits = library("webgpu", quantization, kv, family), GPU_LIMITS["webgpu"]
    parts = [part.partition("\0")[0] for part in re.split(r"// Function: \w+\n", text)]
    shaders = [part for part in parts if "@compute" in part]  # behind the last one are other bytes
    assert len(shaders) > 20
    for shader in shaders:
        assert not re.search(r"\b[iu](8|16|64)\b|\bf64\b", shader)
        (threads,) = re.findall(r"@workgroup_size\((\d+), 1, 1\)", shader)
        assert int(threads) <= limits.threads
        sizes = {"f32": 4, "i32": 4, "u32": 4, "f16": 2}
        arrays = re.findall(r"var<workgroup> \w+ ?: ?array<(\w+), ?(\d+)>", shader)
        assert sum(sizes[kind] * int(count) for kind, count in arrays) <= limits.shared_bytes
        assert len(re.findall(r"var<storage", shader)) <= limits.storage_buffers


def test_an_opencl_library_has_the_source_of_its_kernels(library):
    text = library("opencl", "q4f16_1", "k=int4:v=int3")
    for kernel in ("paged_attention", "kv_seal", "linear_int4", "rms_norm"):
        assert re.search(rf"__kernel void .*{kernel}", text), kernel
    assert '"kind": "opencl"' in text
    assert not re.search(r"&\([\d.]+e[+-]\d+f\)", text)  # TVM's way to reinterpret takes an address


def test_gpus_without_fp16():
    kernels = gpu_target("webgpu", limits=replace(GPU_LIMITS["webgpu"], float16=False)).kernels
    assert kernels.linear(16, 64, "float32") is not None
    rows = KVLayout(1, 2, 64, 4, 4, 64, "float16", "lanes")
    for refused in (
        lambda: kernels.linear(16, 64, "int4"),
        lambda: kernels.embedding(16, 64, "float16"),
        lambda: kernels.prepare_vector(16, "float16"),
        lambda: kernels.attention_shape(rows, 4),
    ):
        with pytest.raises(
            CompileError, match=r"webgpu is compiled for GPUs without fp16, which .* use q0f32"
        ):
            refused()


def test_what_cannot_be_compiled_for(monkeypatch):
    with pytest.raises(CompileError, match=r"a weight with 60 inputs .* no multiple of 8"):
        gpu_target("metal").kernels.linear(16, 60, "float32")
    monkeypatch.setattr(module.tvm, "get_global_func", lambda *_, **__: None)
    with pytest.raises(CompileError, match="no code generator for vulkan: pip install kvq-vulkan"):
        gpu_target("vulkan")
