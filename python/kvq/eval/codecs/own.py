"""kvq's formats as codecs: the proof that a simulated row says what the compiled library would."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvq.inspect_cache import through_format
from kvq.layout import KVLayout
from kvq.quantization.scheme import KVQuantization


@dataclass(frozen=True)
class OwnCodec:
    """A scheme of kvq's through its numpy reference; satisfies :class:`kvq.eval.codecs.base.Codec`."""

    kv: KVQuantization
    page_size: int = 64

    @property
    def name(self) -> str:
        """Name of the format, after ``peer:`` on the command line."""
        return f"kvq-{self.kv}"

    @property
    def description(self) -> str:
        """The format in a line."""
        return f"kvq's {self.kv} by its numpy reference"

    def bits_per_value(self, head_dim: int) -> float:
        """Bits stored per cached value, scales included; the mean of K and V."""
        return self._layout(head_dim, self.page_size).bits_per_value

    def round_trip(self, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What attention reads of the keys and values of full pages, float32 ``[..., page, head_dim]``."""
        return through_format(k, v, self._layout(k.shape[-1], k.shape[-2]))

    def _layout(self, head_dim: int, page_size: int) -> KVLayout:
        return KVLayout(1, 1, head_dim, self.kv.k_bits, self.kv.v_bits, page_size)


CODECS = tuple(OwnCodec(KVQuantization(name, name)) for name in ("int8", "int4", "int3"))
