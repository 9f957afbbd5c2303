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
    mixed_keys: bool = True
    page_size: int = 64
    per_token = False

    @property
    def name(self) -> str:
        """Name of the format, after ``peer:`` on the command line."""
        return f"kvq-{self.kv}" + ("" if self.mixed_keys else "-even")

    @property
    def description(self) -> str:
        """The format in a line."""
        if self.kv.k == "int8":
            return f"kvq's {self.kv} by its numpy reference"
        widths = "widths of keys by their ranges, without queries" if self.mixed_keys else "keys of one width"
        return f"kvq's {self.kv} by its numpy reference, {widths}"

    def bits_per_value(self, head_dim: int) -> float:
        """Bits stored per cached value, scales included; the mean of K and V."""
        return self._layout(head_dim, self.page_size).bits_per_value

    def round_trip(self, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What attention reads of the keys and values of full pages, float32 ``[..., page, head_dim]``."""
        return through_format(k, v, self._layout(k.shape[-1], k.shape[-2]))

    def _layout(self, head_dim: int, page_size: int) -> KVLayout:
        kv = self.kv
        return KVLayout(1, 1, head_dim, kv.k_bits, kv.v_bits, page_size, mixed_keys=self.mixed_keys)


CODECS = (
    OwnCodec(KVQuantization("int8", "int8")),
    *(OwnCodec(KVQuantization(name, name), mixed) for name in ("int4", "int3") for mixed in (True, False)),
)
