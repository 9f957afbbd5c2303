"""kvq compile: overrides, targets, linking, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvq.compiler import compile_model
from kvq.compiler.compile import parse_overrides
from kvq.compiler.hosts import this_host
from kvq.compiler.link import find_linker, linker_for
from kvq.compiler.target import cpu_target
from kvq.config import ChatConfig
from kvq.errors import CompileError, ConfigError
from kvq.gen_config import gen_config
from kvq.runtime.library import Library
from tiny_llama import GOLDEN_CASES

AVX2 = {"avx2", "fma", "f16c"}
VNNI = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512vnni"}


@pytest.fixture
def config_dir(tmp_path: Path) -> Path:
    GOLDEN_CASES["gqa1_d64_tied"].write(tmp_path / "checkpoint")
    gen_config(tmp_path / "checkpoint", "q4f16_1", tmp_path / "out", kv_quantization="int4")
    return tmp_path / "out"


def test_overrides_are_read():
    assert parse_overrides(None) == {}
    text = "context_window_size=256; page_size=128;kv_quantization=k=int4:v=int3"
    expected = {"context_window_size": 256, "page_size": 128, "kv_quantization": "k=int4:v=int3"}
    assert parse_overrides(text) == expected


@pytest.mark.parametrize("text", ["colour=1", "page_size", "page_size=-1", "max_batch_size=two"])
def test_bad_overrides_are_refused(text):
    with pytest.raises(ConfigError, match="--overrides"):
        parse_overrides(text)


def test_target_follows_the_features():
    assert cpu_target("O2", VNNI).isa.dot == "vnni512"
    assert cpu_target("O2", VNNI - {"avx512vnni"}).isa.dot == "maddubs"
    assert cpu_target("O2", AVX2).features == ("avx2", "fma", "f16c")
    for plain in (cpu_target("O0", VNNI), cpu_target("O2", set())):
        assert plain.isa.dot == "generic" and plain.features == ()


def test_library_describes_itself(config_dir, tmp_path):
    library = compile_model(
        config_dir,
        tmp_path / "lib.so",
        opt="O1",
        overrides="kv_quantization=int3;page_size=128;context_window_size=300",
        debug_dump=tmp_path / "dump",
    )
    meta = Library.load(library).metadata
    assert (meta.quantization, meta.kv_quantization, meta.opt) == ("q4f16_1", "int3", "O1")
    assert meta.activations == "float32"
    assert meta.layout.page_size == 128 and meta.layout.k_bits == 3
    assert meta.context_window_size == 300
    assert meta.model == ChatConfig.load(config_dir).model
    assert set(meta.cpu_features) == set(cpu_target().features)
    dumped = sorted(path.name.split("_", 1)[1] for path in (tmp_path / "dump").glob("*.py"))
    assert {"lower_kv_cache.py", "lower_weights.py", "attach_metadata.py"} <= set(dumped)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"opt": "O7"}, "unknown --opt 'O7'"),
        ({"activations": "fp8"}, "unknown --activations 'fp8': use one of auto, float16, bfloat16"),
        ({"activations": "bfloat16"}, "--activations bfloat16 goes with --device cuda and --opt O2"),
        ({"activations": "float16", "device": "cuda", "opt": "O1"}, "goes with --device cuda and --opt O2"),
        ({"device": "toaster"}, "--device 'toaster'"),
        ({"overrides": "page_size=48"}, "page size 48"),
        ({"overrides": "kv_quantization=int5"}, "kv-quantization 'int5'"),
    ],
)
def test_bad_requests_leave_the_old_library(config_dir, tmp_path, arguments, message):
    old = tmp_path / "lib.so"
    old.write_bytes(b"old")
    with pytest.raises((ConfigError, CompileError), match=message) as caught:
        compile_model(config_dir, old, **arguments)
    assert "\n" not in str(caught.value)
    assert old.read_bytes() == b"old" and [p.name for p in tmp_path.glob("*lib*")] == ["lib.so"]


def test_unwritable_output_is_refused(config_dir, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CompileError, match="cannot write"):
        compile_model(config_dir, tmp_path / "file" / "lib.so")


def test_linker_is_found_or_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "ccache clang")
    assert find_linker() == ["ccache", "clang"]
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CompileError, match="no C compiler"):
        find_linker()
    monkeypatch.setenv("CC", "/bin/false")
    with pytest.raises(CompileError, match="/bin/false could not link"):
        linker_for(this_host())(str(tmp_path / "a.so"), [])
