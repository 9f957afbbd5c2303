"""``kvq eval``, ``kvq bench`` and ``kvq inspect`` from command line to output, on a tiny compiled model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq.cli.main import main
from tiny_llama import TinyLlama

TEXT = "Do not all fix'd Bodies, when heated beyond a certain degree, emit Light and shine? " * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama(seed=20, gqa=3, head_dim=64).write(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(autouse=True)
def own_cache(build_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CACHE", str(build_cache))


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_eval_perplexity(checkpoint: Path, text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "perplexity", str(checkpoint), "--quantization", "q0f32", "--text", str(text_file)]
    words += ["--kv", "int4,int3,k=int4:v=int3", "--window", "200", "--max-tokens", "300"]
    rows = run_json(capsys, *words, "--chunk", "64")
    assert [row["kv"] for row in rows] == ["float32", "int4", "int3", "k=int4:v=int3"]
    exact, int4, int3, mix = rows
    assert {row["scored_tokens"] for row in rows} == {199 + 99}
    assert exact["delta_percent"] == exact["kl"] == exact["kl_p99"] == exact["quantized_keys"] == 0
    assert exact["top1_percent"] == 100
    assert 0 < int4["kl"] < mix["kl"] < int3["kl"] < int3["kl_p99"]
    assert int4["keys"] == exact["keys"] == 199 * 200 // 2 + 99 * 100 // 2
    assert int4["quantized_keys"] == sum(p // 64 * 64 for p in [*range(199), *range(99)])
    assert int4["bits_per_value"] == pytest.approx(4 + (64 * 3 + 64 * 2) * 8 / (2 * 64 * 64))
    assert exact["bits_per_value"] == 32
    again = run_json(capsys, *words, "--chunk", "7")
    same = ("kv", "perplexity", "kl", "top1_percent")
    assert [[row[key] for key in same] for row in again] == [[row[key] for key in same] for row in rows]


def test_eval_prints_what_it_attended_to(
    checkpoint: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "perplexity", str(checkpoint), "--quantization", "q0f32", "--text", str(text_file)]
    assert main([*words, "--kv", "int4", "--window", "130", "--max-tokens", "130", "--chunk", "50"]) == 0
    out = capsys.readouterr().out
    assert "against float32; prefill chunk: 50 tokens" in out
    assert f"attends to quantized pages: {64 * 64 + 128} of {129 * 130 // 2} keys" in out
    assert f"attends to quantized pages: 0 of {129 * 130 // 2} keys" in out


def test_bench_decode(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "decode", str(checkpoint), "--quantization", "q0f32", "--kv", "none,int4"]
    words += ["--context", "10,150", "--steps", "4", "--rounds", "2"]
    rows = run_json(capsys, *words, "--batch", "1,3")
    assert [(row["batch"], row["context"], row["kv"]) for row in rows] == [
        (batch, context, kv) for batch in (1, 3) for context in (10, 150) for kv in ("none", "int4")
    ]
    assert all(row["slowest"] <= row["tokens_per_second"] for row in rows)
    assert all(row["ratio"] == 1 for row in rows if row["kv"] == "none")


def test_a_shape_without_its_library_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "decode", "llama-3-8b", "--random-weights", "--kv", "int4"]
    assert main([*words, "--libraries", str(tmp_path)]) == 2
    assert "q4f16_1-int4.so: no such library: write it with --compile-only" in capsys.readouterr().err
    assert main(["bench", "decode", "smollm2", "--compile-only"]) == 2


def test_bench_prefill(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "prefill", str(checkpoint), "--quantization", "q0f32", "--kv", "int4,int3"]
    rows = run_json(capsys, *words, "--tokens", "30,100", "--chunk", "64", "--rounds", "1")
    assert [(row["tokens"], row["chunk"], row["kv"]) for row in rows] == [
        (30, 30, "int4"),
        (30, 30, "int3"),
        (100, 64, "int4"),
        (100, 64, "int3"),
    ]


def test_inspect(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = tmp_path / "cache.npz"
    words = ["inspect", str(checkpoint), "--quantization", "q0f32", "--kv", "int3"]
    words += ["--layer", "0", "--head", "1"]
    assert main([*words, "--prompt", TEXT[:150], "--page", "1", "--dump", str(dump)]) == 0
    out = capsys.readouterr().out
    assert "150 tokens (150 of the prompt), sealed pages of 64 tokens: 2" in out
    assert "page 1, layer 0, KV head 1" in out
    found = np.load(dump)
    assert found["k_codes"].shape == (2, 2, 2, 64, 64)
    # The first layer reads no cache, so what is served there is the format, but for a rounding to float16.
    same = np.isclose(found["k"][:, 0], found["format_k"][:, 0], rtol=1e-2, atol=1e-2)
    assert same.mean() > 0.99
    error = np.abs(found["k"][:, 0] - found["exact_k"][:, 0])
    assert (error <= 0.51 * found["k_scale"][:, 0][..., None, :] + 2e-2).all()
    assert 0.02 < np.sqrt(np.square(error).mean()) < 0.5


def test_inspect_continues_a_short_prompt(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint), "--quantization", "q0f32", "--prompt", "Once upon a time"]) == 0
    assert "64 tokens (16 of the prompt), sealed pages of 64 tokens: 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["eval", "perplexity", "MODEL", "--kv", "int5"], "int5"),
        (["eval", "perplexity", "MODEL", "--text", "absent.txt"], "absent.txt"),
        (["eval", "perplexity", "MODEL", "--window", "8", "--stride", "9"], "--stride 9"),
        (["eval", "perplexity", "MODEL", "--chunk", "0"], "--chunk 0"),
        (["bench", "decode", "MODEL", "--context", "12k"], "--context"),
        (["bench", "decode", "MODEL", "--context", "0"], "--context 0"),
        (["bench", "decode", "MODEL", "--context", "100000"], "context window"),
        (["bench", "prefill", "MODEL", "--rounds", "0"], "--rounds 0"),
        (["inspect", "MODEL", "--prompt", ""], "--prompt"),
        (["inspect", "MODEL", "--prompt", "x", "--kv", "none"], "--kv none"),
        (["inspect", "MODEL", "--prompt", "x", "--layer", "2"], "--layer 2"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], names: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(checkpoint) if word == "MODEL" else word for word in words]
    assert main([*words, "--quantization", "q0f32"]) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.strip()]
    assert names in lines[-1]
    assert lines[-1].startswith("kvq: error: ")
    assert "Traceback" not in captured.err
    assert captured.out == ""
