"""What a GPU can do, as far as the portable kernels must know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuLimits:
    """Limits that a kernel keeps; the least of all devices that a library is for.

    Attributes
    ----------
    threads : int
        Most threads of a workgroup.
    shared_bytes : int
        Most bytes of shared memory of a workgroup.
    subgroup : int
        Lanes of a subgroup whose members may exchange registers; 0 where the target has no such instructions.
    float16 : bool
        Whether fp16 can be stored in buffers and computed with.
    storage_buffers : int
        Most buffers that a kernel may name.
    """

    threads: int
    shared_bytes: int
    subgroup: int = 0
    float16: bool = True
    storage_buffers: int = 16
