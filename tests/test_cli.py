"""The command line's frame: help, errors in one line, exit codes; and the commands that need no model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from kvq.cli import main as frame
from kvq.cli.chat import Session, _interruptible
from kvq.errors import ConfigError, KvqError

COMMANDS = list(frame.COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        frame.main([command, "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert f"kvq {command}" in text and "example" in text
    assert len(text.splitlines()) <= 50


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        frame.main(["--help"])
    text = capsys.readouterr().out
    assert all(f"\n    {command}" in text for command in COMMANDS)


@pytest.mark.parametrize(
    "words", [["gen-config"], ["convert-weight"], ["plan"], ["frobnicate"], [], ["plan", "a", "--x"]]
)
def test_a_wrong_command_line_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        frame.main(words)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and "error:" in err and "--help" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "llama-9"], "no such preset, file or directory; presets: llama-2-7b"),
        (["plan", "llama-3-8b", "-q", "q5"], "unknown --quantization 'q5'"),
        (["plan", "llama-3-8b", "--kv-quantization", "int5"], "unknown --kv-quantization 'int5'"),
        (["plan", "llama-3-8b", "--memory", "lots"], "'lots' is not a size"),
        (["plan", "llama-3-8b", "--memory", "1GB"], "largest term is weights_bytes"),
        (["plan", "llama-3-8b", "--batch", "0"], "--max-batch-size 0"),
        (["chat", "./nowhere"], "nowhere"),
        (["chat", "./nowhere", "--quantization", "q9"], "unknown --quantization 'q9'"),
        (["chat", "./nowhere", "--model-lib", "./no.so"], "no.so: no such library"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert frame.main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1 and captured.err.startswith("kvq: error: ") and not captured.out


def test_debug_shows_the_traceback_before_and_after_the_command() -> None:
    for words in (["--debug", "plan", "llama-9"], ["plan", "llama-9", "--debug"]):
        with pytest.raises(KvqError):
            frame.main(words)


def test_an_os_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import kvq.cli.plan

    def full(_args: object) -> int:
        raise OSError(28, "No space left on device", "/tmp/x.bin")

    monkeypatch.setattr(kvq.cli.plan, "run", full)
    assert frame.main(["plan", "llama-3-8b"]) == 2
    assert capsys.readouterr().err == "kvq: error: /tmp/x.bin: No space left on device\n"


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvq.cli.plan

    def stop(_args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(kvq.cli.plan, "run", stop)
    assert frame.main(["plan", "llama-3-8b"]) == 130


def test_a_reader_that_left_is_no_error() -> None:
    code = "import sys; from kvq.cli.main import main; sys.exit(main(['plan', 'llama-3-8b', '--json']))"
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert process.returncode == 141 and process.stderr == ""


def test_plan_json_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3-8b", "--quantization", "q3f16kv", "--context-window-size", "8192"]
    assert frame.main([*words, "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["kv_sealed_bytes"] == 208 * 2**20 and fields["bits_per_value"] == 3.25
    assert "max_sequences" not in fields
    assert frame.main(words) == 0
    text = capsys.readouterr().out
    assert "208.0 MiB" in text and f"{fields['total_bytes']:,}" in text and "8,192 tokens" in text


def test_plan_with_a_budget_says_how_many_sequences_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "llama-3-70b",
        "-q",
        "q4f16kv",
        "--context-window-size",
        "2148",
        "--memory",
        "48GB",
        "--json",
    ]
    assert frame.main(words) == 0
    fields = json.loads(capsys.readouterr().out)
    assert 20 < fields["max_sequences"] < 40
    fits = ["--batch", str(fields["max_sequences"])]
    assert frame.main([*words, *fits]) == 0
    assert frame.main([*words, "--batch", str(fields["max_sequences"] + 1)]) == 2


# ---- chat over the fake model -------------------------------------------------------------------
class FakeEngine:
    """What :class:`Session` needs of an engine."""

    def __init__(self) -> None:
        from kvq.engine.completions import Chat
        from test_engine import make

        self.fake, self.core, completions = make()
        self.chat = Chat(completions)

    def reset(self) -> None:
        self.core.reset()


def test_a_session_keeps_its_messages_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session(FakeEngine(), "be brief", {"max_tokens": 5, "seed": None})  # type: ignore[arg-type]
    assert session.options == {"max_tokens": 5}
    first = session.answer("hi")
    assert len(first) == 5 and first in capsys.readouterr().out
    session.command("/set max_tokens = 7")
    assert len(session.answer("more")) == 7
    assert [m["role"] for m in session.messages] == ["system", "user", "assistant", "user", "assistant"]
    session.command("/reset")
    assert session.messages == [{"role": "system", "content": "be brief"}]
    assert session.answer("hi")[:5] == first
    session.command("/help")
    assert "/stats" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["/nothing", "/set", "/set colour=red", "/set seed=x"])
def test_wrong_session_commands(line: str) -> None:
    with pytest.raises(ConfigError):
        Session(FakeEngine(), None, {}).command(line)  # type: ignore[arg-type]


def test_the_loop_goes_on_after_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["/nothing", "", "x" * 400, "hi", "/exit", "never"])
    monkeypatch.setattr("builtins.input", lambda _prompt: next(lines))
    session = Session(FakeEngine(), None, {"max_tokens": 4})  # type: ignore[arg-type]
    session.loop()
    captured = capsys.readouterr()
    assert "no command /nothing" in captured.err and "context window" in captured.err
    assert len(session.messages) == 2 and next(lines) == "never"


def test_ctrl_c_stops_the_answer_and_not_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    session = Session(engine, None, {"max_tokens": 100})  # type: ignore[arg-type]
    step, count = engine.fake.step, [0]

    def interrupted_step(*args: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return step(*args, **options)

    engine.fake.step = interrupted_step  # type: ignore[method-assign]
    text = session.answer("hi")
    assert 0 < len(text) < 10 and "[stopped]" in capsys.readouterr().err
    assert session.messages[-1] == {"role": "assistant", "content": text}
    engine.fake.cache.check_integrity()
    assert len(session.answer("go on")) == 100


def test_a_second_ctrl_c_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), _interruptible() as interrupted:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert interrupted
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "kvq", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("kvq ")
