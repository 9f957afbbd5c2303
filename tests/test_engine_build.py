"""From any stage to a model that can run: what is made, reused and refused. The compiler is faked."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import kvq.build
from checkpoints import write_tiny_llama
from kvq.build import BuiltModel, prepare_model
from kvq.config import CHAT_CONFIG_NAME, ChatConfig
from kvq.convert import convert_weight
from kvq.errors import ConfigError, KvqError, LibraryError
from kvq.gen_config import gen_config


def install_fake_compiler(log: Path, fail: bool = False) -> None:
    """A compiler that writes what it was asked for, and logs its calls."""
    module: Any = types.ModuleType("kvq.compiler")

    def compile_model(
        config_path: Path, output: Path, *, device: str = "cpu", opt: str = "O2", **_: Any
    ) -> None:
        config = ChatConfig.load(config_path)
        with open(log, "a") as file:
            file.write(f"{config.kv_quantization} {opt} {config.context_window_size}\n")
        if fail:
            raise ConfigError("compiler says no")
        Path(output).write_text(f"{config.quantization} {config.kv_quantization} {opt}")

    module.compile_model = compile_model
    sys.modules["kvq.compiler"] = module


@pytest.fixture
def log(tmp_path: Path) -> Any:
    real = sys.modules.get("kvq.compiler")
    install_fake_compiler(tmp_path / "log")
    yield tmp_path / "log"
    if real is None:
        del sys.modules["kvq.compiler"]
    else:
        sys.modules["kvq.compiler"] = real


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("checkpoint"))


def compiled(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def check_whole(built: BuiltModel) -> None:
    assert built.library.is_file()
    assert ChatConfig.load(built.config_dir) and (built.config_dir / "tokenizer.json").is_file()
    assert (built.weights_dir / "tensor-cache.json").is_file()


def test_a_checkpoint_is_made_once(checkpoint: Path, tmp_path: Path, log: Path) -> None:
    said: list[str] = []
    first = prepare_model(checkpoint, cache_dir=tmp_path / "c", report=said.append)
    check_whole(first)
    assert len(compiled(log)) == 1 and compiled(log)[0].startswith("int4 O2 ")
    assert any("converting" in line for line in said) and any("compiling" in line for line in said)
    said.clear()
    assert prepare_model(checkpoint, "q4f16kv", cache_dir=tmp_path / "c", report=said.append) == first
    assert len(compiled(log)) == 1 and not said


def test_cache_schemes_share_weights_and_nothing_else(checkpoint: Path, tmp_path: Path, log: Path) -> None:
    built = [
        prepare_model(checkpoint, *scheme, cache_dir=tmp_path / "c")
        for scheme in (("q4f16_1", "int4"), ("q4f16_1", "int3"), ("q4f16_1", None), ("q3f16kv", None))
    ]
    assert len({b.weights_dir for b in built}) == 1
    assert built[1] == built[3] and len({b.library for b in built}) == 3
    assert [line.split()[0] for line in compiled(log)] == ["int4", "int3", "none"]
    other = prepare_model(checkpoint, "q0f32", cache_dir=tmp_path / "c")
    assert other.weights_dir != built[0].weights_dir


@pytest.mark.parametrize("change", [{"opt": "O1"}, {"activations": "bfloat16"}, {"max_batch_size": 129}])
def test_what_a_library_depends_on_is_in_its_key(
    checkpoint: Path, tmp_path: Path, log: Path, change: dict[str, Any]
) -> None:
    first = prepare_model(checkpoint, cache_dir=tmp_path / "c")
    second = prepare_model(checkpoint, cache_dir=tmp_path / "c", **change)
    assert first.library != second.library and first.weights_dir == second.weights_dir
    assert ChatConfig.load(second.config_dir).max_batch_size == change.get("max_batch_size", 128)


def test_smaller_limits_need_no_other_library(checkpoint: Path, tmp_path: Path, log: Path) -> None:
    first = prepare_model(checkpoint, cache_dir=tmp_path / "c")
    small = {"context_window_size": 128, "prefill_chunk_size": 32, "max_batch_size": 1}
    assert prepare_model(checkpoint, cache_dir=tmp_path / "c", **small) == first
    with pytest.raises(ConfigError, match="--context-window-size 4096"):
        prepare_model(checkpoint, cache_dir=tmp_path / "c", context_window_size=4096)


def test_changed_code_makes_everything_anew(
    checkpoint: Path, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare_model(checkpoint, cache_dir=tmp_path / "c")
    monkeypatch.setattr(kvq.build, "_source_digest", lambda: "other")
    second = prepare_model(checkpoint, cache_dir=tmp_path / "c")
    assert first.library != second.library and first.weights_dir != second.weights_dir


def test_another_checkpoint_is_another_model(checkpoint: Path, tmp_path: Path, log: Path) -> None:
    first = prepare_model(checkpoint, cache_dir=tmp_path / "c")
    other = prepare_model(write_tiny_llama(tmp_path / "other", seed=1), cache_dir=tmp_path / "c")
    assert first.weights_dir.parent != other.weights_dir.parent


def test_a_gguf_file(tmp_path: Path, log: Path) -> None:
    path = write_tiny_llama(tmp_path / "m", fmt="gguf")
    check_whole(prepare_model(path, "q0f16", "int3", cache_dir=tmp_path / "c"))
    assert compiled(log)[0].startswith("int3")


@pytest.fixture
def converted(checkpoint: Path, tmp_path: Path) -> Path:
    out = tmp_path / "converted"
    convert_weight(checkpoint, "q4f16_1", out)
    gen_config(checkpoint, "q4f16kv", out)
    return out


def test_a_compiled_pair_is_taken_as_it_is(converted: Path, tmp_path: Path, log: Path) -> None:
    (converted / "lib.so").write_text("x")
    expected = BuiltModel(converted, converted, converted / "lib.so")
    for name in (converted, str(converted), converted / CHAT_CONFIG_NAME):
        assert prepare_model(name, cache_dir=tmp_path / "c") == expected
    assert prepare_model(converted, "q4f16kv", cache_dir=tmp_path / "c") == expected
    assert prepare_model(converted, context_window_size=96, cache_dir=tmp_path / "c") == expected
    elsewhere = tmp_path / "other.so"
    elsewhere.write_text("y")
    assert prepare_model(converted, model_lib=elsewhere, cache_dir=tmp_path / "c").library == elsewhere
    assert not compiled(log) and not (tmp_path / "c").exists()
    (converted / "lib2.so").write_text("x")
    with pytest.raises(LibraryError, match="2 libraries: choose one with --model-lib"):
        prepare_model(converted, cache_dir=tmp_path / "c")


def test_a_converted_directory_is_compiled_and_left_as_it_is(
    converted: Path, tmp_path: Path, log: Path
) -> None:
    before = sorted(path.name for path in converted.iterdir())
    built = prepare_model(converted, cache_dir=tmp_path / "c")
    check_whole(built)
    assert built.weights_dir == converted and sorted(p.name for p in converted.iterdir()) == before
    (converted / "lib.so").write_text("for int4")
    other = prepare_model(converted, kv_quantization="int3", max_batch_size=200, cache_dir=tmp_path / "c")
    assert [line.split()[0] for line in compiled(log)] == ["int4", "int3"]
    config = ChatConfig.load(other.config_dir)
    assert (config.kv_quantization, config.max_batch_size, config.context_window_size) == ("int3", 200, 1024)


def test_other_weights_than_the_directorys_are_refused(converted: Path, tmp_path: Path, log: Path) -> None:
    with pytest.raises(ConfigError, match="its weights are q4f16_1, not q0f16"):
        prepare_model(converted, "q0f16", cache_dir=tmp_path / "c")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("nowhere", {}, "nowhere"),
        ("nowhere", {"quantization": "q7"}, "unknown --quantization 'q7'"),
        ("nowhere", {"kv_quantization": "int7"}, "unknown --kv-quantization 'int7'"),
        ("nowhere", {"model_lib": "gone.so"}, "gone.so: no such library"),
    ],
)
def test_bad_input_is_refused(
    model: str, options: dict[str, Any], message: str, tmp_path: Path, log: Path
) -> None:
    with pytest.raises(KvqError, match=message) as caught:
        prepare_model(tmp_path / model, cache_dir=tmp_path / "c", **options)
    assert "\n" not in str(caught.value)


def test_a_failure_leaves_nothing_half_made(checkpoint: Path, tmp_path: Path, log: Path) -> None:
    install_fake_compiler(log, fail=True)
    with pytest.raises(ConfigError, match="compiler says no"):
        prepare_model(checkpoint, cache_dir=tmp_path / "c")
    root = next((tmp_path / "c" / "models").iterdir())
    visible = [path.name for path in root.iterdir() if not path.name.startswith(".")]
    assert len(visible) == 1 and visible[0].startswith("q4f16_1-") and not list(root.glob(".*.tmp"))
    install_fake_compiler(log)
    # What a killed process left behind is removed, and does not disturb.
    name = next(root.glob(".q4f16_1-int4-*.lock")).name.removesuffix(".lock")
    stale = root / f"{name}.99999.tmp"
    stale.mkdir()
    check_whole(prepare_model(checkpoint, cache_dir=tmp_path / "c"))
    assert not stale.exists()


def test_an_unwritable_cache_directory_is_one_line(checkpoint: Path, tmp_path: Path, log: Path) -> None:
    (tmp_path / "c").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot be written: .*KVQ_CACHE"):
        prepare_model(checkpoint, cache_dir=tmp_path / "c")


def _build(checkpoint: Path, cache: Path, log: Path, start: Any, found: Any) -> None:
    install_fake_compiler(log)
    start.wait()
    found.put(prepare_model(checkpoint, cache_dir=cache))


def test_two_processes_at_once_build_once(checkpoint: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, found = context.Barrier(3), context.Queue()
    arguments = (checkpoint, tmp_path / "c", tmp_path / "log", start, found)
    processes = [context.Process(target=_build, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    built = [found.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert built[0] == built[1] == built[2]
    check_whole(built[0])
    assert len(compiled(tmp_path / "log")) == 1


def test_a_moved_checkpoint_is_the_same_model(checkpoint: Path, tmp_path: Path, log: Path) -> None:
    first = prepare_model(checkpoint, cache_dir=tmp_path / "c")
    shutil.copytree(checkpoint, tmp_path / "copy")
    assert prepare_model(tmp_path / "copy", cache_dir=tmp_path / "c").library == first.library
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    config["rms_norm_eps"] = 1e-4
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config))
    assert prepare_model(tmp_path / "copy", cache_dir=tmp_path / "c").library != first.library
