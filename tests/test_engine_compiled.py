"""The runtime and the engine over a compiled tiny model: bytes, refusals, forks, and the engine's answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvq.engine.setup
from checkpoints import write_tiny_llama
from kvq.build import BuiltModel, prepare_model
from kvq.config import ChatConfig
from kvq.convert import convert_weight
from kvq.engine import Engine
from kvq.errors import CacheError, KvqError, LibraryError, OutOfMemoryError
from kvq.memory import plan_memory
from kvq.quantization.scheme import resolve
from kvq.runtime.library import Library
from kvq.runtime.loaded_model import LoadedModel, load_model
from kvq.runtime.metadata import Metadata
from kvq.sizes import parse_size

CONTEXT, CHUNK, BATCH = 448, 192, 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), vocab_size=264)


@pytest.fixture(scope="module")
def built(checkpoint: Path, build_cache: Path) -> BuiltModel:
    return prepare_model(checkpoint, "q4f16kv", cache_dir=build_cache)


@pytest.fixture(scope="module")
def model(built: BuiltModel) -> LoadedModel:
    return load_model(
        built.library,
        built.weights_dir,
        context_window_size=CONTEXT,
        max_batch_size=BATCH,
        prefill_chunk_size=CHUNK,
    )


@pytest.fixture(scope="module")
def pair(built: BuiltModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled pair: configuration, weights and library in one directory."""
    directory = tmp_path_factory.mktemp("pair")
    for source in (built.config_dir, built.weights_dir):
        shutil.copytree(source, directory, dirs_exist_ok=True)
    return directory


@pytest.fixture
def cache(model: LoadedModel) -> Any:
    yield model.cache
    for sequence in model.cache.sequence_ids:
        model.cache.remove_sequence(sequence)
    model.cache.check_integrity()
    assert model.cache.num_free_pages == model.cache.pool.num_pages


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.RandomState(seed).randint(3, 250, count).tolist()


def feed(model: LoadedModel, sequence: str, ids: list[int], chunk: int = CHUNK) -> np.ndarray:
    """Append tokens; the logits after the last."""
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        logits = np.array(model.step([(sequence, len(part))], part)[0])
    return logits


def cold(model: LoadedModel, ids: list[int]) -> np.ndarray:
    """Logits after the last token, from an empty sequence."""
    model.cache.add_sequence("cold")
    logits = feed(model, "cold", ids)
    model.cache.remove_sequence("cold")
    return logits


# ---- bytes --------------------------------------------------------------------------------------
def test_plan_layout_and_allocation_agree_to_the_byte(built: BuiltModel, model: LoadedModel) -> None:
    config = ChatConfig.load(built.config_dir)
    weights, kv = resolve(config.quantization, config.kv_quantization)
    plan = plan_memory(config.model, weights, kv, CONTEXT, BATCH, CHUNK)
    found = model.nbytes
    assert plan.kv_sealed_bytes == found["pool"] == model.shape.num_pages * model.layout.page_bytes
    assert plan.kv_open_bytes == found["open"] == BATCH * model.layout.open_page_bytes
    assert plan.kv_workspace_bytes == found["workspace"] + found["scratch"] + found["faults"]
    assert plan.weights_bytes == model.params.nbytes == model.library.params_bytes
    assert plan.max_tokens == model.cache.capacity == BATCH * CONTEXT
    assert model.tensors.pool.shape == model.layout.pool_shape(model.shape.num_pages)


def test_capacity_is_filled_exactly(model: LoadedModel, cache: Any) -> None:
    for index in range(BATCH):
        cache.add_sequence(index)
        feed(model, index, tokens(CONTEXT, index))  # type: ignore[arg-type]
    assert cache.num_free_pages == 0
    feed(model, 0, tokens(63))  # type: ignore[arg-type]
    with pytest.raises(CacheError, match="out of KV pages"):
        feed(model, 0, [5])  # type: ignore[arg-type]
    with pytest.raises(CacheError, match="remove one first"):
        cache.add_sequence("more")


# ---- sequences ----------------------------------------------------------------------------------
@pytest.mark.parametrize("position", [0, 1, 63, 64, 65, 128, 150, 191, 199, 200])
def test_fork_and_popn_go_on_as_if_nothing_else_had_been(
    model: LoadedModel, cache: Any, position: int
) -> None:
    ids, other = tokens(200), tokens(70, 1)
    expected = cold(model, ids[:position] + other)
    cache.add_sequence("a")
    feed(model, "a", ids)
    again = cache.fork_sequence("a", "b", position)
    assert np.array_equal(feed(model, "b", ids[position - again : position] + other), expected)
    assert np.array_equal(feed(model, "a", other), cold(model, ids + other))  # the parent is untouched
    again = cache.popn("a", 270 - position)
    assert np.array_equal(feed(model, "a", ids[position - again : position] + other), expected)


def test_a_batch_gives_each_sequence_what_it_gets_alone(model: LoadedModel, cache: Any) -> None:
    lengths = [1, 64, 100, 300]
    prompts = [tokens(length, length) for length in lengths]
    alone = [cold(model, [*prompt, 7, 8]) for prompt in prompts]
    for index, prompt in enumerate(prompts):
        cache.add_sequence(index)
        feed(model, index, prompt)  # type: ignore[arg-type]
    model.step([(i, 1) for i in range(4)], [7] * 4)
    together = model.step([(i, 1) for i in range(4)], [8] * 4)
    assert all(np.array_equal(together[i], alone[i]) for i in range(4))


def test_ragged_prefill_and_chosen_rows(model: LoadedModel, cache: Any) -> None:
    first, second = tokens(70, 1), tokens(9, 2)
    alone = [cold(model, first[:65]), cold(model, first), cold(model, second)]
    cache.add_sequence(0)
    cache.add_sequence(1)
    logits = model.step([(0, 70), (1, 9)], first + second, [64, 69, 78])
    assert all(np.array_equal(row, expected) for row, expected in zip(logits, alone, strict=True))


# ---- the engine ---------------------------------------------------------------------------------
def test_engine_gives_the_same_answer_in_any_chunks_and_from_a_warm_cache(
    pair: Path, model: LoadedModel
) -> None:
    prompt = tokens(150)
    expected = list(prompt)
    for _ in range(80):
        expected.append(int(cold(model, expected)[:259].argmax()))
    for chunk in (1, 64, CHUNK):
        engine = Engine(pair, prefill_chunk_size=chunk)
        create = engine.completions.create
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 80, "ignore_eos": True}
        answer = create(prompt=prompt, **options)
        assert answer.choices[0].text == engine.tokenizer.decode(expected[150:])
        create(prompt=prompt[:70] + tokens(40, 3), **options)
        warm = create(prompt=prompt, **options)
        assert warm.choices[0].text == answer.choices[0].text
        assert warm.usage.prompt_tokens_details.cached_tokens == 128
        sizes = engine.allocated_bytes()
        assert sum(sizes.values()) == engine.plan.weights_bytes + engine.plan.kv_bytes


def test_engine_from_a_checkpoint(
    checkpoint: Path, build_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVQ_CACHE", str(build_cache))
    engine = Engine(checkpoint, quantization="q4f16kv", context_window_size=CONTEXT, prefill_chunk_size=CHUNK)
    messages = [{"role": "user", "content": "Hello"}]
    chunks = list(
        engine.chat.completions.create(messages=messages, stream=True, max_tokens=8, ignore_eos=True)
    )
    assert chunks[-1].choices[0].finish_reason == "length" and engine.last_request.completion_tokens == 8
    whole = engine.chat.completions.create(messages=messages)
    assert whole.usage.total_tokens <= CONTEXT and engine.stats().faults == (0, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_sequence": 40},
        {"memory": "40MB"},
        {"memory": 30_000_000, "mode": "interactive"},
        {"gpu_memory_utilization": 0.001, "max_num_sequence": 3},
        {"mode": "server", "context_window_size": 256},
    ],
)
def test_what_is_allocated_is_what_was_planned(
    pair: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(kvq.engine.setup, "available_memory", lambda: 50_000_000_000)
    engine = Engine(pair, **options)
    sizes, plan = engine.allocated_bytes(), engine.plan
    assert sizes["weights"] == plan.weights_bytes
    assert (sizes["pool"], sizes["open"]) == (plan.kv_sealed_bytes, plan.kv_open_bytes)
    assert sizes["workspace"] + sizes["scratch"] + sizes["faults"] == plan.kv_workspace_bytes
    if "memory" in options:
        assert 0 <= parse_size(str(options["memory"])) - plan.total_bytes < engine.model.layout.page_bytes
    stats = engine.stats()
    assert stats.total_pages * 64 == plan.max_tokens
    assert stats.max_running == options.get("max_num_sequence", stats.max_running)
    answers = engine.generate([tokens(70, i) for i in range(5)], max_tokens=10, ignore_eos=True)
    assert [answer.finish_reason for answer in answers] == ["length"] * 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "1GB", "gpu_memory_utilization": 0.5}, "exclude each other"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization 1.5 makes no sense"),
        ({"mode": "fast"}, "--mode 'fast' is unknown"),
        ({"max_num_sequence": 1000, "model_lib": True}, "--max-num-sequence 1000 is outside 1"),
        ({"memory": "1MB"}, "are needed and 976.6 KiB are there; the largest term is activation_bytes"),
        ({"memory": "twelve"}, "'twelve' is not a size"),
    ],
)
def test_memory_options_that_cannot_be_met_are_refused(
    pair: Path, options: dict[str, Any], message: str
) -> None:
    if "model_lib" in options:
        options = {**options, "model_lib": pair / "lib.so"}
    refused(KvqError, message, lambda: Engine(pair, **options))


def test_an_engine_that_does_not_fit_is_refused_before_it_allocates(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvq.engine.setup, "available_memory", lambda: 100_000)
    refused(OutOfMemoryError, "activation_bytes .* lower it with --prefill-chunk-size", lambda: Engine(pair))


# ---- refusals -----------------------------------------------------------------------------------
def refused(error: type[KvqError], message: str, call: Any) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_libraries_that_are_none_are_refused(tmp_path: Path) -> None:
    refused(LibraryError, "no such library", lambda: Library.load(tmp_path / "gone.so"))
    (tmp_path / "text.so").write_text("no library")
    refused(LibraryError, "not a library that kvq compile wrote", lambda: Library.load(tmp_path / "text.so"))
    refused(LibraryError, "not supported", lambda: Library.load(tmp_path / "text.so", device="tpu"))


def test_a_truncated_library_is_refused(built: BuiltModel, tmp_path: Path) -> None:
    data = built.library.read_bytes()
    (tmp_path / "half.so").write_bytes(data[: len(data) // 3])
    refused(LibraryError, "half.so: the file is truncated", lambda: Library.load(tmp_path / "half.so"))


def test_weights_of_another_scheme_or_model_are_refused(
    built: BuiltModel, checkpoint: Path, tmp_path: Path
) -> None:
    library = Library.load(built.library)
    convert_weight(checkpoint, "q0f16", tmp_path / "q0f16")
    refused(
        LibraryError,
        "has no tensor model.embed_tokens.q_weight",
        lambda: library.load_params(tmp_path / "q0f16"),
    )
    other = write_tiny_llama(tmp_path / "other", vocab_size=264, num_layers=3)
    convert_weight(other, "q4f16_1", tmp_path / "more")
    refused(LibraryError, "is not used by", lambda: library.load_params(tmp_path / "more"))
    shutil.copytree(built.weights_dir, tmp_path / "shape")
    table = tmp_path / "shape" / "tensor-cache.json"
    content = json.loads(table.read_text())
    record = content["records"][0]["records"][0]
    record["shape"] = [record["shape"][0] * 2, record["shape"][1] // 2]
    table.write_text(json.dumps(content))
    refused(LibraryError, f"{record['name']} is uint32", lambda: library.load_params(tmp_path / "shape"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cpu_features": ["avx2", "sve9"]}, "needs CPU features sve9"),
        ({"kvq_version": "0.0.1"}, "compiled by kvq 0.0.1"),
        ({"tvm_version": "0.1"}, "compiled by TVM 0.1"),
    ],
)
def test_libraries_for_another_machine_or_version_are_refused(
    built: BuiltModel, change: dict[str, Any], message: str
) -> None:
    text = str(Library.load(built.library)._machine["_metadata"]())
    metadata = Metadata.parse(json.dumps({**json.loads(text), **change}))
    current = json.loads(text)
    refused(
        LibraryError,
        message,
        lambda: metadata.check_compatible("lib.so", current["tvm_version"], {"avx2", "fma", "f16c"}),
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kvq_version": 1}'])
def test_unreadable_metadata_is_refused(text: str) -> None:
    refused(LibraryError, "compile it again", lambda: Metadata.parse(text))


@pytest.mark.parametrize(
    "limits",
    [{"context_window_size": 1025}, {"prefill_chunk_size": 1025}, {"max_batch_size": 129}],
)
def test_more_than_the_library_was_compiled_for_is_refused(built: BuiltModel, limits: dict[str, int]) -> None:
    refused(LibraryError, "outside 1", lambda: load_model(built.library, built.weights_dir, **limits))


def test_a_library_of_another_cache_scheme_is_refused(pair: Path) -> None:
    refused(
        LibraryError,
        "a KV cache in int4, not q4f16_1 and int3",
        lambda: Engine(pair, model_lib=pair / "lib.so", kv_quantization="int3"),
    )
    refused(
        LibraryError,
        "was compiled for activations in (int8|float32), not bfloat16",
        lambda: Engine(pair, model_lib=pair / "lib.so", activations="bfloat16"),
    )
