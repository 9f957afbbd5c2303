"""Which GPUs this machine has, asked without loading anything."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache

#: Oldest CUDA architecture with the instructions that the kernels need.
OLDEST_CUDA_ARCH = 80


@cache
def cuda_archs() -> tuple[str, ...]:
    """CUDA architectures of this machine's GPUs such as ``sm_90``, oldest first; empty without any."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    found = re.findall(r"^(\d+)\.(\d+)$", done.stdout, re.MULTILINE) if done.returncode == 0 else []
    numbers = sorted({int(major) * 10 + int(minor) for major, minor in found})
    return tuple(f"sm_{number}" for number in numbers if number >= OLDEST_CUDA_ARCH)
