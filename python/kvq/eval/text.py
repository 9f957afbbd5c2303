"""The text that is scored: prose or code that ships with kvq, or a file."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from kvq.errors import ConfigError

#: Name that ``--text`` defaults to.
DEFAULT_TEXT = "opticks"
#: Files of the texts that ship, by name; sources and licences are in ``texts/README.md``.
SHIPPED = {DEFAULT_TEXT: ("opticks_queries.txt", "opticks_fits.txt"), "code": ("tvm_code.txt",)}


def read_text(name: str) -> str:
    """The text of a file, or of the one that ships with kvq under ``name``.

    Raises
    ------
    ConfigError
        If there is no such file, or it is not UTF-8.
    """
    if name in SHIPPED and not Path(name).exists():
        directory = files("kvq.eval") / "texts"
        return "".join((directory / file).read_text(encoding="utf-8") for file in SHIPPED[name])
    try:
        return Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {name}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ConfigError(
            f"--text {name}: {error.strerror}: give a file, or {', or '.join(SHIPPED)}"
        ) from None
