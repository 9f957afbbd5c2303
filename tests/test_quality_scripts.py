"""The scripts of docs/quality.md: the search ranks as theory says, the table divides what it should."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(importlib.import_module("sys").modules, name, module)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_search_ranks_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.RandomState(0)
    k, v = rng.standard_normal((2, 3, 1, 2, 64, 64))
    k = k * np.where(np.arange(64) % 16, 1, 10) + 3 * rng.standard_normal(64)
    np.savez(tmp_path / "dump.npz", exact_k=k.astype(np.float32), exact_v=v.astype(np.float32))
    module = script("search_formats", monkeypatch)
    monkeypatch.setattr(
        "sys.argv", ["search_formats", str(tmp_path / "dump.npz"), "--json", "--bits", "4", "3"]
    )
    module.main()
    found = {(row["bits"], row["format"]): row for row in json.loads(capsys.readouterr().out)}
    assert len(found) == 2 * len(module.candidates())
    channel, token = "asymmetric, half, per channel, page 64", "asymmetric, half, per token"
    for bits in (4, 3):
        at = {name: found[bits, name] for name in (channel, token, "refitted, half, per channel, page 64")}
        assert at[channel]["bits_per_value_d128"] == bits + 32 / 64
        assert at[token]["bits_per_value_d128"] == bits + 32 / 128
        assert at[channel]["k_error"] < at[token]["k_error"] / 3
        assert at["refitted, half, per channel, page 64"]["k_error"] < at[channel]["k_error"]
    for kind in ("attention_error_of_k", "attention_error_of_v"):
        assert 0 < found[4, channel][kind] < 0.7 * found[3, channel][kind]
    assert 2 < found[3, channel]["v_error"] / found[4, channel]["v_error"] < 8
    best, worst = (found[4, f"asymmetric, half, per channel, page {page}"]["k_error"] for page in (32, 128))
    assert best < worst


def row(kv: str, kl: float, scored: int = 100) -> dict[str, object]:
    numbers = ("bits_per_value", "bits_per_value_d128", "perplexity", "delta_percent", "delta_stderr")
    numbers += ("kl_stderr", "kl_p99", "top1_percent")
    fixed = {
        "window": 64,
        "stride": 64,
        "chunk": 8,
        "quantization": "q0f16",
        "opt": "O1",
        "scored_tokens": scored,
    }
    return {"kv": kv, "kl": kl, **dict.fromkeys(numbers, 1.0), **fixed}


def test_table_compares_equal_widths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, other = (tmp_path / f"{name}.json" for name in ("one", "two", "other"))
    one.write_text(json.dumps([row("float32", 0.0), row("int4", 0.01), row("int3", 0.04)]))
    names = {"llama.cpp-q4_0-rotated": 0.035, "vllm-turboquant_3bit_nc": 0.2, "kivi-int2": 0.3}
    two.write_text(json.dumps([row("float32", 0.0)] + [row(f"peer:{n}", kl) for n, kl in names.items()]))
    other.write_text(json.dumps([row("float32", 0.0, scored=99)]))
    module = script("quality_table", monkeypatch)
    monkeypatch.setattr("sys.argv", ["quality_table", str(one), str(two)])
    module.main()
    lines = capsys.readouterr().out.splitlines()
    last = {
        line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[-1] for line in lines if "|" in line
    }
    assert last["peer:llama.cpp-q4_0-rotated"] == "3.5"
    assert last["peer:vllm-turboquant_3bit_nc"] == "5.0"
    assert last["peer:kivi-int2"] == "1.0%", "no int2 of kvq's was measured: the cell is empty"
    monkeypatch.setattr("sys.argv", ["quality_table", str(one), str(other)])
    with pytest.raises(SystemExit, match="not scored on"):
        module.main()
