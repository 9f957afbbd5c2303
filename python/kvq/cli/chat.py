"""``kvq chat``: a conversation in the terminal, or one answer to ``--prompt``."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvq.engine import Engine

NAME = "chat"

_EXAMPLE = """example:
  kvq chat smollm2 --kv-quantization int4
  kvq chat ./out --model-lib ./out/lib.so --prompt "What is a page table?" --max-tokens 100
"""

_HELP = """/help             this list
/stats            what the last answer cost
/reset            start a new conversation
/set NAME=VALUE   change {options}
/exit             leave (so does Ctrl-D); Ctrl-C stops an answer"""

#: Options that ``/set`` knows, and how to read them.
SETTABLE = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "max_tokens": int,
    "seed": int,
}


def add_parser(subparsers: Any) -> None:
    """Add the command to ``kvq``."""
    parser = subparsers.add_parser(
        NAME,
        help="talk to a model; --prompt answers once",
        description="Talk to a model from any stage; what is missing is converted and compiled first.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="smollm2, .gguf, checkpoint, or converted directory")
    add_engine_options(parser)
    add = parser.add_argument
    add("--prompt", metavar="TEXT", help="answer this and exit")
    add("--system", metavar="TEXT", help="system message")
    add("--max-tokens", type=int, metavar="N", help="most tokens of an answer (default: the context)")
    add("--temperature", type=float, metavar="T", help="0 is greedy (default: the model's)")
    add("--top-p", type=float, metavar="P", help="nucleus sampling (default: the model's)")
    add("--seed", type=int, metavar="N", help="makes sampling repeatable")
    parser.set_defaults(func=run)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Options that say which model to build and run."""
    add = parser.add_argument
    add("--quantization", "-q", metavar="Q", help="weights, or an alias (default: its own, else q4f16kv)")
    add("--kv-quantization", metavar="K", help="cache: none, int8, int4, int3, or k=int4:v=int3")
    add("--context-window-size", type=int, metavar="N", help="most tokens of a conversation")
    add("--prefill-chunk-size", type=int, metavar="N", help="most tokens of a prefill step")
    add("--device", default="cpu", metavar="D", help="cpu, cuda, vulkan or vulkan:1 (default: cpu)")
    add("--model-lib", metavar="FILE", help="compiled library (default: beside the model, else compiled)")
    add("--opt", metavar="O", help="O0 .. O3 if it has to be compiled; O1 has exact activations")
    add("--activations", metavar="T", help="on CUDA's tensor cores: auto, float16 or bfloat16")


def open_engine(args: argparse.Namespace) -> Engine:
    """The engine that :func:`add_engine_options` describes; shows what is being done, and the memory plan."""
    from kvq.cli.tables import error_console
    from kvq.engine import Engine

    console = error_console()
    logging.getLogger("kvq").setLevel(logging.INFO)
    with console.status("preparing") as status:
        return Engine(
            args.model,
            quantization=args.quantization,
            kv_quantization=args.kv_quantization,
            context_window_size=args.context_window_size,
            prefill_chunk_size=args.prefill_chunk_size,
            device=args.device,
            model_lib=args.model_lib,
            opt=args.opt,
            activations=args.activations,
            mode="interactive",
            report=status.update,
        )


def run(args: argparse.Namespace) -> int:
    """Run ``kvq chat``."""
    options = {name: getattr(args, name, None) for name in ("temperature", "top_p", "max_tokens", "seed")}
    session = Session(open_engine(args), args.system, options)
    if args.prompt is not None:
        session.answer(args.prompt)
        return 0
    session.loop()
    return 0


class Session:
    """A conversation: its messages and sampling options.

    Parameters
    ----------
    engine : Engine
    system : str, optional
        System message.
    options : dict
        Of ``chat.completions.create``; None for the model's default.
    """

    def __init__(self, engine: Engine, system: str | None, options: dict[str, Any]) -> None:
        self.engine = engine
        self.options = {name: value for name, value in options.items() if value is not None}
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._system)

    def loop(self) -> None:
        """Read lines until ``/exit`` or the end of input."""
        from kvq.errors import KvqError

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives input() line editing and history)
        if sys.stdin.isatty():
            print("/help lists the commands", file=sys.stderr)
        while True:
            try:
                line = input(">>> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                print("\n/exit or Ctrl-D leaves", file=sys.stderr)
                continue
            if line == "/exit":
                return
            try:
                if line.startswith("/"):
                    self.command(line)
                elif line:
                    self.answer(line)
            except KeyboardInterrupt:
                print("\n[stopped]", file=sys.stderr)
            except KvqError as error:
                print(f"error: {error}", file=sys.stderr)

    def command(self, line: str) -> None:
        """Run a line that starts with a slash.

        Raises
        ------
        ConfigError
            If there is no such command or option.
        """
        from kvq.errors import ConfigError

        name, _, rest = line.partition(" ")
        if name == "/help":
            print(_HELP.format(options=", ".join(SETTABLE)))
        elif name == "/stats":
            print(describe_stats(self.engine))
        elif name == "/reset":
            self.messages = list(self._system)
            self.engine.reset()
        elif name == "/set":
            key, _, value = (part.strip() for part in rest.partition("="))
            if key not in SETTABLE:
                raise ConfigError(f"/set {key!r}: use one of {', '.join(SETTABLE)}")
            try:
                self.options[key] = SETTABLE[key](value)
            except ValueError:
                raise ConfigError(f"/set {key}: {value!r} is not a number") from None
        else:
            raise ConfigError(f"no command {name}: /help lists them")

    def answer(self, prompt: str) -> str:
        """Stream the answer to stdout and keep it in the conversation; Ctrl-C stops it."""
        messages = [*self.messages, {"role": "user", "content": prompt}]
        stream = self.engine.chat.completions.create(messages=messages, stream=True, **self.options)
        parts: list[str] = []
        reason: str | None = None
        with _interruptible() as interrupted, contextlib.closing(stream):  # type: ignore[type-var]
            for chunk in stream:
                parts.append(chunk.choices[0].delta.content or "")
                reason = chunk.choices[0].finish_reason
                print(parts[-1], end="", flush=True)
                if interrupted:
                    reason = "stopped"
                    break
        print(flush=True)
        if reason in ("length", "stopped"):
            print(f"[{reason}]", file=sys.stderr)
        text = "".join(parts)
        self.messages = [*messages, {"role": "assistant", "content": text}]
        return text


@contextlib.contextmanager
def _interruptible() -> Iterator[list[bool]]:
    """Ctrl-C makes the list true instead of raising, so that a step is not torn; a second one raises."""
    interrupted: list[bool] = []

    def handler(_signal: int, _frame: Any) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(True)

    try:
        before = signal.signal(signal.SIGINT, handler)
    except ValueError:  # not in the main thread
        yield interrupted
        return
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def describe_stats(engine: Engine) -> str:
    """What the last answer cost, and what the cache holds."""
    from kvq.sizes import format_bytes

    stats, now, layout = engine.last_request, engine.stats(), engine.model.layout
    lines = [
        f"prompt {stats.prompt_tokens} tokens, {stats.cached_tokens} of them from the cache; "
        f"answer {stats.completion_tokens}",
        f"prefill {stats.prefill_rate:.1f} tokens/s, decode {stats.decode_rate:.1f} tokens/s",
        f"KV cache {engine.metadata.kv_quantization}: {layout.bits_per_value:.2f} bits per value, "
        f"{layout.page_bytes / layout.page_size:.0f} bytes per token, "
        f"{now.used_pages + now.cached_pages} of {now.total_pages} pages in use",
    ]
    lines.append(f"weights {engine.metadata.quantization}, activations {engine.metadata.activations}")
    lines += [f"{name}: {format_bytes(size)}" for name, size in engine.allocated_bytes().items()]
    if any(now.faults):
        lines.append(f"NaNs replaced: {now.faults[0]}, values saturated: {now.faults[1]}")
    return "\n".join(lines)
