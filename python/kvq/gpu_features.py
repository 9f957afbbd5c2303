"""Which GPUs this machine has, asked without loading anything."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache

#: Oldest CUDA architecture with the instructions that the kernels need.
OLDEST_CUDA_ARCH = 80
#: The architecture whose code for it alone is much faster.
HOPPER = 90


@cache
def cuda_archs() -> tuple[str, ...]:
    """CUDA architectures of this machine's GPUs such as ``sm_89``, oldest first; empty without any.

    A Hopper GPU is ``sm_90a``, with the matrix instructions that no later GPU has.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    found = re.findall(r"^(\d+)\.(\d+)$", done.stdout, re.MULTILINE) if done.returncode == 0 else []
    numbers = sorted({int(major) * 10 + int(minor) for major, minor in found})
    return tuple(
        f"sm_{number}" + ("a" if number == HOPPER else "") for number in numbers if number >= OLDEST_CUDA_ARCH
    )
