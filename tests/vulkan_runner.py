"""Runs portable kernels on a Vulkan device through kvq-vulkan: SPIR-V that ``spirv-val`` has seen."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from typing import Any

import tvm
from tvm import tirx

from kvq.compiler.gpu_target import GpuTarget


@cache
def missing() -> str | None:
    """Why nothing can be run here; None if it can."""
    try:
        import kvq_vulkan
    except ImportError:
        return "no package kvq-vulkan (pip install ./vulkan)"
    return kvq_vulkan.problem() or None


def validate(module: Any) -> None:
    """Fail on SPIR-V that is not valid for Vulkan 1.2, where there is ``spirv-val`` to say so."""
    import kvq_vulkan

    if shutil.which("spirv-val") is None:
        return
    for name, code in kvq_vulkan.shaders(module).items():
        done = subprocess.run(
            ["spirv-val", "--target-env", "vulkan1.2", "-"], input=code, capture_output=True, check=False
        )
        assert done.returncode == 0, (name, done.stderr.decode())


def build(func: tirx.PrimFunc, target: GpuTarget) -> Any:
    """The kernel, as a function of tensors on :func:`device`."""
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    built = tvm.compile(module, target=target.target, tir_pipeline=target.tir_pipeline)
    validate(built.mod)
    return built["main"]


def device() -> Any:
    """The first device."""
    return tvm.device("vulkan", 0)
