"""Runs kernels in WGSL through ``wgpu``, on Mesa's lavapipe or whatever device there is."""

from __future__ import annotations

import os
import re
import struct
from functools import cache
from typing import Any

import numpy as np
from tvm import tirx

from device_launches import HostCode, Launch
from kvq.compiler.gpu_target import GPU_LIMITS, GpuTarget

#: Mesa's Vulkan device on the CPU, preferred: a GPU would make results depend on the machine.
_LAVAPIPE = "/usr/share/vulkan/icd.d/lvp_icd.x86_64.json"
#: WebGPU has two dimensions for TVM's grids, and this many workgroups along each.
_MOST_GROUPS = 65535


@cache
def missing() -> str | None:
    """Why no shader can be run here; None if it can."""
    try:
        import wgpu
    except ImportError:
        return "no package wgpu"
    if _adapter(wgpu) is None:
        return "no Vulkan device with shader-f16 (Debian: mesa-vulkan-drivers)"
    return None


@cache
def _adapter(wgpu: Any) -> Any:
    if os.path.exists(_LAVAPIPE):
        os.environ.setdefault("VK_DRIVER_FILES", _LAVAPIPE)
        os.environ.setdefault("GALLIVM_PERF", "nopt")  # most of the time of a test is its compiler's
    for adapter in wgpu.gpu.enumerate_adapters_sync():
        if adapter.info["backend_type"] == "Vulkan" and "shader-f16" in adapter.features:
            return adapter
    return None


@cache
def _device() -> Any:
    """A device with no more than kvq's target promises."""
    import wgpu

    limits = GPU_LIMITS["webgpu"]
    return _adapter(wgpu).request_device_sync(
        required_features=["shader-f16"],
        required_limits={
            "max-compute-invocations-per-workgroup": limits.threads,
            "max-compute-workgroup-size-x": limits.threads,
            "max-compute-workgroup-storage-size": limits.shared_bytes,
            "max-storage-buffers-per-shader-stage": limits.storage_buffers,
        },
    )


class WgslKernel:
    """A kernel, compiled for WebGPU."""

    def __init__(self, func: tirx.PrimFunc, target: GpuTarget) -> None:
        self._host = HostCode(func, target)
        self._shaders = {name: _Shader(name, source) for name, source in self._host.sources.items()}

    def __call__(self, *arguments: np.ndarray | int | float) -> None:
        import wgpu

        device, buffers = _device(), {}
        usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC
        for array in (a for a in arguments if isinstance(a, np.ndarray)):
            data = array.tobytes()
            data += bytes(-len(data) % 4 or (0 if data else 4))
            buffers[id(array)] = device.create_buffer_with_data(data=data, usage=usage)
        written: dict[int, np.ndarray] = {}
        for launch in self._host.launches(*arguments):
            self._shaders[launch.name].dispatch(launch, [buffers[id(a)] for a in launch.arrays])
            for array, writes in zip(launch.arrays, self._shaders[launch.name].writes, strict=True):
                if writes:
                    written[id(array)] = array
        for key, array in written.items():
            data = device.queue.read_buffer(buffers[key])[: array.nbytes]
            array[...] = np.frombuffer(data, array.dtype).reshape(array.shape)


class _Shader:
    """One device function; ``writes`` says for each of its buffers whether it may be written."""

    def __init__(self, name: str, source: str) -> None:
        import wgpu

        device = _device()
        bindings = re.findall(r"@binding\((\d+)\) var<storage, (read|read_write)>", source)
        assert [int(i) for i, _ in bindings] == list(range(len(bindings)))
        self.writes = [access == "read_write" for _, access in bindings]
        kinds = ["storage" if writes else "read-only-storage" for writes in self.writes]
        self._layout = device.create_bind_group_layout(
            entries=[
                {"binding": i, "visibility": wgpu.ShaderStage.COMPUTE, "buffer": {"type": kind}}
                for i, kind in enumerate([*kinds, "uniform"])
            ]
        )
        self._pipeline = device.create_compute_pipeline(
            layout=device.create_pipeline_layout(bind_group_layouts=[self._layout]),
            compute={"module": device.create_shader_module(code=source), "entry_point": name},
        )

    def dispatch(self, launch: Launch, buffers: list[Any]) -> None:
        """Run it as TVM's WebGPU runtime does: scalars in 32 bits, then the number of workgroups along x."""
        import wgpu

        x, y, z = launch.grid
        if z != 1 or not (0 < x <= _MOST_GROUPS and 0 < y <= _MOST_GROUPS):
            raise ValueError(
                f"{launch.name}: a grid of {launch.grid}; z must be 1, x and y 1 to {_MOST_GROUPS}"
            )
        words = b"".join(
            struct.pack("<f" if dtype.startswith("float") else "<i", value) for value, dtype in launch.scalars
        )
        device = _device()
        uniform = device.create_buffer_with_data(
            data=words + struct.pack("<I", x), usage=wgpu.BufferUsage.UNIFORM
        )
        group = device.create_bind_group(
            layout=self._layout,
            entries=[
                {"binding": i, "resource": {"buffer": buffer, "offset": 0, "size": buffer.size}}
                for i, buffer in enumerate([*buffers, uniform])
            ],
        )
        encoder = device.create_command_encoder()
        compute = encoder.begin_compute_pass()
        compute.set_pipeline(self._pipeline)
        compute.set_bind_group(0, group)
        compute.dispatch_workgroups(x, y)
        compute.end()
        device.queue.submit([encoder.finish()])
