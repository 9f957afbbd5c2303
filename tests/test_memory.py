"""The memory plan: the request's figures, its fields, its budget, and its sum against the allocation."""

from __future__ import annotations

import json
from typing import Any

import pytest

import kvq.memory_budget
from kvq.cli.main import main
from kvq.errors import ConfigError, LibraryError, OutOfMemoryError
from kvq.layout import KVLayout
from kvq.memory import (
    TYPICAL_CONTEXT,
    MemoryPlan,
    kv_layout,
    plan_memory,
    weights_bytes,
)
from kvq.memory_budget import available_memory, fit_cache
from kvq.presets import PRESETS
from kvq.quantization.scheme import resolve
from kvq.runtime import gpu_memory
from kvq.runtime.cache_shape import CacheShape, logit_bytes, logit_room
from kvq.sizes import format_bytes, parse_size

MIB = 2**20


def plan_of(preset: str, quantization: str, context: int = 8192, batch: int = 1, chunk: int = 2048):
    return plan_memory(PRESETS[preset], *resolve(quantization), context, batch, chunk)


@pytest.mark.parametrize(
    ("quantization", "sealed", "all_of_it"), [("q4f16kv", 272.5, 320), ("q3f16kv", 208.5, 256)]
)
def test_llama_3_8b_at_8192_tokens(quantization: str, sealed: float, all_of_it: float) -> None:
    plan = plan_of("llama-3-8b", quantization)
    assert plan.kv_sealed_bytes <= sealed * MIB
    assert plan.kv_sealed_bytes + plan.kv_open_bytes + plan.kv_workspace_bytes <= all_of_it * MIB
    assert plan.max_tokens == 8192


def test_llama_3_8b_in_fp16_is_what_it_was_said_to_be() -> None:
    assert plan_of("llama-3-8b", "q4f16_1").kv_sealed_bytes == 2 * 32 * 8 * 128 * 8192 * 2


@pytest.mark.parametrize(("quantization", "bits"), [("q4f16kv", 4.25), ("q3f16kv", 3.25), ("q4f16_1", 16)])
def test_bits_per_value_at_head_dim_128(quantization: str, bits: float) -> None:
    assert plan_of("llama-3-8b", quantization).bits_per_value == bits


def test_70b_with_20_users_fits_48_gb() -> None:
    plan = plan_of("llama-3-70b", "q4f16kv", context=2148, batch=20)
    plan.check(parse_size("48GB"))
    shape, fitted = fit("llama-3-70b", "q4f16kv", context=2148, budget=parse_size("48GB"))
    assert 20 <= shape.num_open <= 40 and fitted.max_tokens > 60_000
    with pytest.raises(OutOfMemoryError):
        plan_of("llama-3-70b", "q4f16_1", context=2148, batch=20).check(parse_size("48GB"))


def test_weights_are_what_the_scheme_stores() -> None:
    model = PRESETS["smollm2-135m"]
    per_layer = (576 * (9 + 2 * 3) * 64) + 9 * 64 * 576 + 3 * 1536 * 576
    matrices, norms = 49152 * 576 + 30 * per_layer, (2 * 30 + 1) * 576
    assert weights_bytes(model, resolve("q0f16")[0]) == 2 * matrices + 4 * norms
    assert weights_bytes(model, resolve("q0f32")[0]) == 4 * (matrices + norms)
    assert weights_bytes(model, resolve("q4f16_1")[0]) == matrices // 2 + matrices // 32 * 2 + 4 * norms


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("quantization", ["q0f32", "q0f16", "q4f16_1", "q4f16kv", "q3f16kv"])
def test_every_preset_can_be_planned(preset: str, quantization: str) -> None:
    plan = plan_of(preset, quantization)
    fields = plan.to_dict()
    assert list(fields) == [
        "weights_bytes",
        "kv_sealed_bytes",
        "kv_open_bytes",
        "kv_workspace_bytes",
        "activation_bytes",
        "device_bytes",
        "total_bytes",
        "bits_per_value",
        "max_tokens",
    ]
    assert fields["total_bytes"] == sum(list(fields.values())[:6]) and fields["device_bytes"] == 0
    assert all(
        isinstance(value, int) and value > 0
        for name, value in fields.items()
        if name not in ("bits_per_value", "device_bytes")
    )


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("llama-2-7b", 6.74),
        ("llama-2-13b", 13.02),
        ("llama-2-70b", 68.98),
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.55),
        ("llama-3.2-1b", 1.236),
        ("llama-3.2-3b", 3.213),
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-7b", 7.616),
        ("mistral-7b", 7.248),
        ("smollm2-135m", 0.1345),
        ("smollm2-360m", 0.3618),
        ("smollm2-1.7b", 1.711),
        ("smollm3-3b", 3.075),
        ("qwen3-0.6b", 0.596),
        ("qwen3-8b", 8.191),
        ("qwen3-30b-a3b", 30.53),
        ("mixtral-8x7b", 46.70),
        ("gemma-2-2b", 2.614),
        ("gemma-2-9b", 9.242),
        ("gemma-3-270m", 0.2681),
        ("gemma-3-1b", 0.99989),
        ("phi-3-mini-4k", 3.821),
        ("olmo-2-7b", 7.299),
    ],
)
def test_presets_have_as_many_weights_as_their_makers_say(preset: str, billions: float) -> None:
    count = weights_bytes(PRESETS[preset], resolve("q0f16")[0]) / 2e9
    assert count == pytest.approx(billions, rel=1e-3)


def test_the_largest_term_and_its_flag_are_named() -> None:
    for quantization, context, batch, chunk, words in (
        ("q0f16", 8192, 1, 2048, ("weights_bytes", "--quantization")),
        ("q4f16_1", 8192, 64, 2048, ("kv_sealed_bytes", "--kv-quantization")),
        ("q4f16kv", 64, 512, 64, ("weights_bytes", "--quantization")),
        ("q4f16kv", 64, 2048, 64, ("kv_open_bytes", "--max-batch-size")),
        ("q4f16kv", 131072, 1, 131072, ("activation_bytes", "--prefill-chunk-size")),
    ):
        plan = plan_of("llama-3-8b", quantization, context, batch, chunk)
        with pytest.raises(OutOfMemoryError) as caught:
            plan.check(2**30)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert "\n" not in str(caught.value)
        plan.check(plan.total_bytes)


def fit(preset: str, quantization: str, context: int = 8192, **options: Any) -> tuple[CacheShape, MemoryPlan]:
    model = PRESETS[preset]
    weights, kv = resolve(quantization)
    common = {"prefill_chunk_size": 2048, "max_batch_size": 128}
    return fit_cache(
        model,
        kv_layout(model, weights, kv),
        weights_bytes=weights_bytes(model, weights),
        context_window_size=context,
        **{**common, **options},
    )


@pytest.mark.parametrize("sequences", [None, 1, 7, 100])
@pytest.mark.parametrize("mode", ["local", "interactive", "server"])
def test_a_budget_is_filled_to_the_last_page(sequences: int | None, mode: str) -> None:
    layout = kv_layout(PRESETS["llama-3-8b"], *resolve("q4f16kv"))
    budget = 10 * 2**30
    shape, plan = fit("llama-3-8b", "q4f16kv", budget=budget, mode=mode, max_num_sequence=sequences)
    assert plan.total_bytes <= budget < plan.total_bytes + layout.page_bytes
    assert plan.max_tokens == shape.num_pages * 64 and plan.kv_open_bytes == shape.open_bytes(layout)
    if sequences is not None or mode == "interactive":
        assert shape.num_open == (sequences or 1)


@pytest.mark.parametrize("budget", [7, 9, 12])
def test_open_pages_are_balanced_against_sealed_ones(budget: int) -> None:
    """One sequence more would leave less than 2,048 tokens for each."""
    shape, plan = fit("llama-3-8b", "q4f16kv", budget=budget * 2**30)
    assert 1 < shape.num_open < 128 and plan.max_tokens >= max(8192, 2048 * shape.num_open)
    _, more = fit("llama-3-8b", "q4f16kv", budget=budget * 2**30, max_num_sequence=shape.num_open + 1)
    assert more.max_tokens < 2048 * (shape.num_open + 1)


def test_fewer_bits_run_more_sequences_in_the_same_bytes() -> None:
    """What an fp16 cache needs for four requests of 2,112 tokens, the open pages from the same bytes."""
    model = PRESETS["smollm2-135m"]
    layout = kv_layout(model, *resolve("q4f16_1"))
    common: dict[str, Any] = {"context": 2112, "prefill_chunk_size": 256}
    rest = fit("smollm2-135m", "q4f16_1", **common, max_num_sequence=1)[1]
    fixed = rest.total_bytes - rest.kv_sealed_bytes - rest.kv_open_bytes
    budget = fixed + 4 * (33 * layout.page_bytes + layout.open_page_bytes)
    found = {
        scheme: fit("smollm2-135m", scheme, **common, budget=budget + 2**20)[0].num_open
        for scheme in ("q4f16_1", "q4f16kv", "q3f16kv")
    }
    assert found["q4f16_1"] == 4 and found["q4f16kv"] >= 13 and found["q3f16kv"] >= 16


@pytest.mark.parametrize(
    ("options", "sequences", "tokens"),
    [
        ({"mode": "interactive"}, 1, 8192),
        ({}, 4, 8192),
        ({"max_num_sequence": 20}, 20, 40960),
        ({"context": 100, "max_num_sequence": 20}, 20, 20 * 64),
        ({"context": 63}, 4, 64),
        ({"max_batch_size": 2}, 2, 8192),
        ({"budget": 16 * 2**30, "fill": False, "max_num_sequence": 2}, 2, 2 * 8192),
        ({"budget": 9 * 2**30, "fill": False, "mode": "interactive"}, 1, 8192),
    ],
)
def test_pages_of_the_modes(options: dict[str, Any], sequences: int, tokens: int) -> None:
    shape, plan = fit("llama-3-8b", "q4f16kv", **options)
    assert (shape.num_open, plan.max_tokens) == (sequences, tokens)


def test_pools_of_pages_are_tensors_that_the_device_can_have() -> None:
    """Half of what the budget leaves room for; without a limit the same budget has more of both kinds."""
    layout = kv_layout(PRESETS["llama-3-8b"], *resolve("q4f16kv"))
    common: dict[str, Any] = {"budget": 16 * 2**30, "max_batch_size": 512}
    free, _ = fit("llama-3-8b", "q4f16kv", **common)
    largest = free.num_open * layout.open_page_bytes // 2
    shape, plan = fit("llama-3-8b", "q4f16kv", **common, largest_tensor=largest)
    assert plan.kv_sealed_bytes <= largest < plan.kv_sealed_bytes + layout.page_bytes
    assert plan.kv_open_bytes <= largest and shape.num_open < free.num_open
    some, _ = fit("llama-3-8b", "q4f16kv", max_num_sequence=20, largest_tensor=200 * layout.page_bytes)
    assert (some.num_pages, some.num_open) == (200, 20)
    with pytest.raises(OutOfMemoryError, match=r"8192 tokens take .* but a tensor of the device has at most"):
        fit("llama-3-8b", "q4f16kv", largest_tensor=127 * layout.page_bytes)


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(OutOfMemoryError, match="weights_bytes"):
        fit("llama-3-8b", "q4f16kv", budget=2**30)
    with pytest.raises(OutOfMemoryError, match=r"kv_sealed_bytes .* --kv-quantization int3, or a smaller"):
        fit("llama-3-8b", "q4f16_1", context=131072, budget=16 * 2**30)
    with pytest.raises(ConfigError, match="--mode 'fast' is unknown: use local, interactive, server"):
        fit("llama-3-8b", "q4f16kv", mode="fast")
    with pytest.raises(ConfigError, match=r"--max-num-sequence 129 is outside 1 \.\. 128"):
        fit("llama-3-8b", "q4f16kv", max_num_sequence=129)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("48GB", 48 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("512", 512),
        ("2 mb", 2 * 10**6),
        ("3K", 3000),
        ("1tib", 2**40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "12XB", "1e9"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (5, 2048, 272 * MIB, 3 * 2**29)] == [
        "5 B",
        "2.0 KiB",
        "272.0 MiB",
        "1.5 GiB",
    ]


@pytest.mark.parametrize(
    ("context", "batch", "chunk", "shape"),
    [
        (8192, 1, 2048, (128, 1, 32)),
        (8191, 1, 2048, (127, 1, 32)),
        (100, 3, 64, (3, 3, 1)),
        (63, 1, 1, (1, 1, 1)),
        (64, 1, 66, (1, 1, 1)),
        (128, 1, 66, (2, 1, 2)),
    ],
)
def test_pages_for_limits(context: int, batch: int, chunk: int, shape: tuple[int, int, int]) -> None:
    found = CacheShape.for_limits(
        KVLayout(2, 2, 64), context_window_size=context, max_batch_size=batch, prefill_chunk_size=chunk
    )
    assert (found.num_pages, found.num_open, found.num_workspace) == shape


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="--prefill-chunk-size 0"):
        CacheShape.for_limits(KVLayout(2, 2, 64), context_window_size=10, prefill_chunk_size=0)


def test_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": "MemTotal: 99 kB\nMemAvailable:    2048 kB\n"}
    monkeypatch.setattr(kvq.memory_budget, "_read", lambda path: files.get(path, ""))
    assert available_memory() == 2 * MIB
    files |= {"/sys/fs/cgroup/memory.max": "3000000\n", "/sys/fs/cgroup/memory.current": "1000000\n"}
    assert available_memory() == 2000000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert available_memory() == 2 * MIB
    files.clear()
    assert available_memory() is None


def test_plan_says_what_an_engine_makes_of_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3-8b", "--quantization", "q4f16kv", "--memory", "9GiB"]
    assert main([*words, "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    shape, plan = fit("llama-3-8b", "q4f16kv", budget=9 * 2**30)
    assert (fields["served_sequences"], fields["served_tokens"]) == (shape.num_open, plan.max_tokens)
    assert main(words) == 0
    assert f"runs {shape.num_open} requests at once" in capsys.readouterr().out


def test_a_gpu_is_planned_by_what_its_library_takes() -> None:
    model = PRESETS["llama-2-70b"]
    weights, kv = resolve("q4f16kv", None)
    budget, step, device = parse_size("48GB"), 722 * 10**6, 700 * 10**6

    def fitted(**costs: int) -> tuple[CacheShape, MemoryPlan]:
        return fit_cache(
            model,
            kv_layout(model, weights, kv),
            weights_bytes=weights_bytes(model, weights),
            context_window_size=4096,
            prefill_chunk_size=2048,
            max_batch_size=128,
            mode="server",
            budget=budget,
            **costs,
        )

    shape, plan = fitted(step_bytes=step, device_bytes=device)
    rooms = 2 * logit_room(shape.num_open) - 1
    assert plan.activation_bytes == step + logit_bytes(model, rooms) and plan.device_bytes == device
    assert budget - kv_layout(model, weights, kv).page_bytes < plan.total_bytes <= budget
    assert fitted()[0].num_pages > shape.num_pages


def test_rooms_of_logits_are_powers_of_two() -> None:
    assert [logit_room(rows) for rows in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]


class FakeDriver:
    """CUDA and NVML of a GPU of 1,000 bytes, of which ``taken`` are in use."""

    taken = 100

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            if name == "nvmlDeviceGetMemoryInfo":
                memory = args[1]._obj
                memory.total, memory.used, memory.free = 1000, self.taken, 1000 - self.taken
            elif name == "nvmlDeviceGetComputeRunningProcesses_v3":
                args[1]._obj.value = 2
                for one, pid, used in zip(args[2], (7, 9), (30, 70), strict=False):
                    one.pid, one.used = pid, used
            return 0

        return call


def test_the_drivers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(gpu_memory.ctypes, "CDLL", lambda name: driver)
    memory = gpu_memory.GpuMemory()
    before = memory.used
    assert (before, memory.free) == (100, 900)
    assert [memory.used_by(pid) for pid in (9, 7, 0)] == [70, 30, 0]
    driver.taken = 350
    assert memory.overhead(before) == 250 + gpu_memory.HEADROOM
    driver.taken = 50  # somebody else went
    assert memory.overhead(before) == gpu_memory.HEADROOM

    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open")

    monkeypatch.setattr(gpu_memory.ctypes, "CDLL", missing)
    with pytest.raises(LibraryError, match=r"no CUDA driver: libcuda\.so\.1"):
        gpu_memory.GpuMemory()


def test_a_plan_for_a_gpu_counts_its_driver(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-2-70b", "--memory", "48GB", "--json", "--kv-quantization"]
    found = {}
    for device in ("cpu", "cuda"):
        for kv in ("int4", "none"):
            assert main([*words, kv, "--device", device]) == 0
            found[device, kv] = json.loads(capsys.readouterr().out)
    gpu = found["cuda", "int4"]
    assert gpu["device_bytes"] == TYPICAL_CONTEXT + gpu_memory.HEADROOM
    assert gpu["served_sequences"] < found["cpu", "int4"]["served_sequences"]
    assert gpu["served_sequences"] >= 20 > found["cuda", "none"]["served_sequences"] >= 10
