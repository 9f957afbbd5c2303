"""Cache formats of others, as references: a file a family, each stating what it really stores.

They follow what is published of each format and share no code with it. Every one is measured through the same
compiled library as kvq's own (:class:`kvq.eval.compiled.CodecPrefiller`).
"""

from __future__ import annotations

from kvq.errors import ConfigError
from kvq.eval.codecs import ggml, kivi, lmdeploy, mlc, own, vllm
from kvq.eval.codecs.base import Codec

__all__ = ["HOME_PREFIX", "PEERS", "PEER_PREFIX", "Codec", "peer_codec"]

#: What stands before a codec's name where cache schemes are listed: pages are coded when they are full.
PEER_PREFIX = "peer:"
#: The same, but a token is coded as soon as it is written, as formats that work token by token do at home.
HOME_PREFIX = "home:"
#: All codecs by name.
PEERS: dict[str, Codec] = {
    codec.name: codec for family in (mlc, lmdeploy, ggml, kivi, vllm, own) for codec in family.CODECS
}


def peer_codec(name: str) -> Codec:
    """The codec of ``peer:name`` or ``home:name``.

    Raises
    ------
    ConfigError
        If there is none, or it cannot code a token by itself.
    """
    codec = PEERS.get(name.removeprefix(PEER_PREFIX).removeprefix(HOME_PREFIX))
    if codec is None:
        raise ConfigError(f"unknown peer {name!r}: kvq eval perplexity --list-peers names them")
    if name.startswith(HOME_PREFIX) and not codec.per_token:
        raise ConfigError(f"{name}: this format codes whole pages: use {PEER_PREFIX}{codec.name}")
    return codec
