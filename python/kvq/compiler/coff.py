"""Symbols of COFF objects, which Windows' linkers take (Microsoft's PE Format, "COFF Symbol Table")."""

from __future__ import annotations

import struct

_HEADER = struct.Struct("<HHIIIHH")
_SYMBOL = struct.Struct("<8sIhHBB")
_EXTERNAL = 2


def undefined_symbols(data: bytes) -> set[str]:
    """Names that an object takes from elsewhere.

    Parameters
    ----------
    data : bytes
        A COFF object of fewer than 65,280 sections.
    """
    _, _, _, table, count, _, _ = _HEADER.unpack_from(data)
    strings = table + _SYMBOL.size * count
    names, i = set(), 0
    while i < count:
        name, value, section, _, storage, auxiliary = _SYMBOL.unpack_from(data, table + _SYMBOL.size * i)
        if storage == _EXTERNAL and section == 0 and value == 0:
            names.add(_name(data, name, strings))
        i += 1 + auxiliary
    return names


def _name(data: bytes, field: bytes, strings: int) -> str:
    """A name of up to eight bytes stands in its field, a longer one among the strings behind the symbols."""
    zero, offset = struct.unpack("<II", field)
    if zero:
        return field.rstrip(b"\0").decode()
    start = strings + offset
    return data[start : data.index(b"\0", start)].decode()
