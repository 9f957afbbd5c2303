"""The texts that ship: what the table of sources says of them, and how they are found."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import pytest

from kvq.errors import ConfigError
from kvq.eval.text import DEFAULT_TEXT, SHIPPED, read_text

TEXTS = files("kvq.eval") / "texts"
SCRIPT = Path(__file__).parents[1] / "scripts" / "make_eval_text.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_eval_text", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_names_every_text_and_its_hash() -> None:
    rows = re.findall(
        r"\| `(\S+\.txt)` \| ([\d,]+) \|.*`([0-9a-f]{64})` \|", (TEXTS / "README.md").read_text()
    )
    assert {name for name, _, _ in rows} == {file for parts in SHIPPED.values() for file in parts}
    for name, _, sha256 in rows:
        assert hashlib.sha256((TEXTS / name).read_bytes()).hexdigest() == sha256, name
    assert sum(int(tokens.replace(",", "")) for _, tokens, _ in rows) >= 60_000


def test_the_script_writes_what_ships(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["make_eval_text.py", str(tmp_path)])
    script.main()
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {name: (TEXTS / name).read_bytes() for parts in SHIPPED.values() for name in parts}


def test_prose_drops_what_is_no_prose(script: ModuleType) -> None:
    book = "before START of\n a _line_.\n\n[Illustration: FIG. 1.]\n\n a | b\n---+---\n\nMore.\n\nEND after"
    assert script.prose(book, "START", "END") == "START of a line.\nMore.\n"


def test_code_keeps_one_header(script: ModuleType) -> None:
    header = "# Licensed to the Apache Software Foundation\n# under the License.\n"
    cpp = "/*\n * Licensed to the Apache Software Foundation\n * under the License.\n */\nint x;\n"
    assert script.code([header + "a = 1\n", cpp]) == header + "\na = 1\n\n\nint x;\n"
    with pytest.raises(AssertionError, match="another form"):
        script.code([header + "a = 1\n", "// " + cpp])


def test_a_file_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = read_text(DEFAULT_TEXT)
    assert shipped.startswith("Query 1. Do not Bodies") and len(shipped) > 150_000
    (tmp_path / DEFAULT_TEXT).write_text("mine")
    assert read_text(DEFAULT_TEXT) == "mine"


def test_unreadable_texts_name_what_would_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory: give a file, or opticks, or code"):
        read_text(str(tmp_path / "absent"))
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_text(str(tmp_path / "latin"))
