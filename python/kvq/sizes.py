"""Numbers of bytes as people write and read them."""

from __future__ import annotations

import re

from kvq.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str) -> int:
    """Bytes of ``48GB`` (powers of 1000), ``44.7GiB`` (of 1024) or ``48000000000``.

    Raises
    ------
    ConfigError
        If the text is no size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"{text!r} is not a size: use for example 48GB or 44.7GiB")
    return int(float(match[1]) * {**_UNITS, **_BINARY_UNITS}[match[2] or ""])


def format_bytes(count: int) -> str:
    """Bytes for people: ``272.0 MiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
