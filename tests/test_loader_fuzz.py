"""Damaged checkpoints of every format are read, or refused in one line: nothing else ever happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints import write_gguf, write_tiny_llama
from kvq.errors import KvqError
from kvq.loader import open_checkpoint
from kvq.loader.chat_source import read_chat_source
from kvq.loader.check import check_tensors
from kvq.loader.source import storage_table
from kvq.model.parameters import model_parameters
from kvq.quantization.storage import STORAGES
from test_group_quantized import write as write_quantized
from tiny_llama import TinyLlama

TINY = TinyLlama(seed=1, num_layers=1, vocab_size=300)


def _plain(fmt: str) -> Callable[[Path], Path]:
    return lambda path: write_tiny_llama(path, fmt=fmt, vocab_size=300, num_layers=1)


def _gguf(path: Path) -> Path:
    path.mkdir()
    return write_gguf(path / "model.gguf", TINY, "Q4_1", dtypes={"embed": "Q8_0", "down": "Q5_0"})


def _awq(path: Path) -> Path:
    write_quantized(path, "awq", 32)
    return path


#: How each kind is written, and where the tables of its file lie: at the start, and at the end of a zip.
KINDS: dict[str, tuple[Callable[[Path], Path], str, list[tuple[int, int]]]] = {
    "safetensors": (_plain("safetensors"), "*.safetensors", [(0, 1500)]),
    "bin": (_plain("bin"), "*.bin", [(0, 2500), (-1200, -1)]),
    "gguf": (_gguf, "*.gguf", [(0, 700), (7000, 9500)]),
    "awq": (_awq, "*.safetensors", [(0, 2500)]),
}


@dataclass
class Written:
    """A whole checkpoint: what to open, the file to damage, and its bytes."""

    path: Path
    file: Path
    data: bytes
    spans: list[tuple[int, int]]


@pytest.fixture(scope="module", params=KINDS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    make, pattern, spans = KINDS[request.param]
    path = make(tmp_path_factory.mktemp("fuzz") / "model")
    file = path if path.is_file() else next(path.glob(pattern))
    return Written(path, file, file.read_bytes(), spans)


def use(path: Path) -> None:
    """Everything that a conversion reads."""
    with open_checkpoint(path) as checkpoint:
        check_tensors(checkpoint, model_parameters(checkpoint.config))
        storage_table(checkpoint)
        for name in checkpoint.tensor_names():
            checkpoint.tensor(name)
            if len(checkpoint.shape(name)) > 1 and STORAGES[checkpoint.storage(name)].bits:
                checkpoint.packed(name)
        read_chat_source(checkpoint)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes(written: Written, data: st.DataObject) -> None:
    damaged = bytearray(written.data)
    for _ in range(data.draw(st.integers(1, 4), label="edits")):
        low, high = data.draw(st.sampled_from(written.spans), label="span")
        at = data.draw(st.integers(low, high), label="at")
        damaged[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255), label="byte")
    written.file.write_bytes(damaged)
    try:
        use(written.path)
    except KvqError as error:
        assert "\n" not in str(error)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kept=st.floats(0, 1, exclude_max=True), tail=st.binary(max_size=3))
def test_files_that_end_elsewhere(written: Written, kept: float, tail: bytes) -> None:
    short = written.data[: int(len(written.data) * kept)]
    written.file.write_bytes(short + tail if len(short) + len(tail) < len(written.data) else short)
    with pytest.raises(KvqError) as error:
        use(written.path)
    assert "\n" not in str(error.value)


def test_the_whole_file_is_read(written: Written) -> None:
    """What the tests above damage is otherwise fine."""
    written.file.write_bytes(written.data)
    use(written.path)
