"""The text that is scored: the prose that ships with kvq, or a file."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from kvq.errors import ConfigError

#: Name that ``--text`` defaults to.
DEFAULT_TEXT = "opticks"
_SHIPPED = {DEFAULT_TEXT: "opticks_queries.txt"}


def read_text(name: str) -> str:
    """The text of a file, or of the one that ships with kvq under ``name``.

    Raises
    ------
    ConfigError
        If there is no such file, or it is not UTF-8.
    """
    if name in _SHIPPED and not Path(name).exists():
        return (files("kvq.eval") / "texts" / _SHIPPED[name]).read_text(encoding="utf-8")
    try:
        return Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {name}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"--text {name}: {error.strerror}: give a file, or {DEFAULT_TEXT}") from None
