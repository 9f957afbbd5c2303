"""``kvq bench serve --peer``: the same requests to other servers, and their figures beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from kvq.errors import ConfigError

#: Figures that are compared: key, words, factor for the table, and unit.
_COMPARED = (
    ("requests_per_second", "requests per second", 1, 2),
    ("answer_tokens_per_second", "answer tokens per second", 1, 1),
    *(
        (f"{key}_p{percent}", f"{words}, p{percent}, ms", 1000, 1)
        for key, words in (("first_token", "first token"), ("inter_token", "next token"))
        for percent in (50, 95, 99)
    ),
    ("errors", "errors", 1, 0),
)


def parse_peers(text: str | None) -> list[str]:
    """Addresses of servers from ``--peer``, separated by commas.

    Raises
    ------
    ConfigError
        If something else is named.
    """
    peers = [name.strip() for name in (text or "").split(",") if name.strip()]
    for peer in peers:
        address = urlsplit(peer)
        if address.scheme not in ("http", "https") or not address.hostname:
            beside = f"; {peer} goes with kvq bench decode" if peer.startswith("torch") else ""
            raise ConfigError(
                f"--peer {peer} is no server: give the address of one that speaks OpenAI's protocol (vLLM, "
                f"LMDeploy, llama.cpp's, kvq), such as --peer http://127.0.0.1:8000{beside}"
            )
    return peers


def comparison(figures: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows of a table: what is compared, the first server's figure, then each other's and its ratio to it.

    Parameters
    ----------
    figures : sequence of dict
        :meth:`kvq.bench.serve.ServeResult.to_dict` of each server.
    """
    rows = []
    for key, words, factor, digits in _COMPARED:
        first = figures[0][key]
        row = [words, _number(first, factor, digits)]
        for other in figures[1:]:
            value = other[key]
            ratio = f"{value / first:.2f}x" if first and value is not None else "-"
            row += [_number(value, factor, digits), ratio]
        rows.append(row)
    return rows


def _number(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"
