"""How one weight matrix is stored: the kinds that kernels exist for, and numpy to pack and unpack them.

A quantized kind keeps codes of 4 or 8 bits; ``group`` consecutive inputs share a scale and, in some kinds, an
offset. A weight is ``(code - center) * scale``, where the offset is ``minimum`` plus that, and where it is
``zero`` the center itself; all of it in float32. Codes are packed in 32-bit words, the first in the lowest
bits; scales and offsets are float16.

The kinds are wide enough for the blocks of GGUF and for AWQ and GPTQ, so that ``--quantization source`` takes
their codes over as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Inputs of a group, unless the kind says otherwise.
GROUP = 32
#: Inputs of a group where each half of 32 has a scale of its own.
HALF_GROUP = 16


@dataclass(frozen=True)
class Storage:
    """A kind of storage.

    Attributes
    ----------
    name : str
        What configuration and kernels call it; of unquantized kinds it is their dtype.
    bits : int or None
        Bits of a code; None where weights are stored as they are.
    group : int
        Consecutive inputs that share a scale: 32 or 16.
    offset : str or None
        What a group has beside its scale: a ``min``imum, the code that is its ``zero``, or nothing.
    """

    name: str
    bits: int | None = None
    group: int = GROUP
    offset: str | None = None

    @property
    def center(self) -> int:
        """The code of the minimum, or of 0 where there is none; 0 where each group has its own."""
        if self.bits == 4:
            return 7 if self.offset is None else 0
        return 128

    @property
    def codes_per_word(self) -> int:
        """Codes in a 32-bit word."""
        assert self.bits is not None
        return 32 // self.bits


STORAGES = {
    kind.name: kind
    for kind in (
        Storage("float32"),
        Storage("float16"),
        Storage("int4", 4),
        Storage("int4_min", 4, offset="min"),
        Storage("int4_zero", 4, offset="zero"),
        Storage("int4_g16", 4, HALF_GROUP),
        Storage("int4_g16_min", 4, HALF_GROUP, "min"),
        Storage("int8", 8),
        Storage("int8_min", 8, offset="min"),
        Storage("int8_g16", 8, HALF_GROUP),
        Storage("int8_g16_min", 8, HALF_GROUP, "min"),
    )
}


def join(*names: str) -> str:
    """The smallest kind that holds what each of the given kinds holds, without rounding it.

    The parts of a fused matrix have one kind, even where a checkpoint quantized them differently.
    """
    kinds = [STORAGES[name] for name in dict.fromkeys(names)]
    if len(kinds) == 1:
        return kinds[0].name
    if any(kind.bits is None for kind in kinds):
        return "float32"  # a code times its scale is no float16
    offsets = {kind.offset for kind in kinds}
    # An int4 code whose center is 7 gets no minimum: 7 times a scale is no float16.
    bits = 8 if len(offsets) > 1 else max(kind.bits or 0 for kind in kinds)
    group, offset = min(kind.group for kind in kinds), "min" if "min" in offsets else None
    return next(k.name for k in STORAGES.values() if (k.bits, k.group, k.offset) == (bits, group, offset))


@dataclass(frozen=True)
class PackedRows:
    """Rows of a quantized matrix, codes apart from their scales.

    Attributes
    ----------
    storage : str
        The kind that holds them.
    codes : numpy.ndarray
        ``uint8[n, K]``.
    scale : numpy.ndarray
        ``float16[n, K / group]``.
    offset : numpy.ndarray or None
        The same, where the kind has one.
    """

    storage: str
    codes: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | None = None

    def dequantized(self) -> np.ndarray:
        """The weights, ``float32[n, K]``."""
        kind = STORAGES[self.storage]
        n, k = self.codes.shape
        groups = self.codes.reshape(n, k // kind.group, kind.group).astype(np.float32) - np.float32(
            kind.center
        )
        offset = None if self.offset is None else self.offset.astype(np.float32)[..., None]
        if kind.offset == "zero":
            groups -= offset
        groups *= self.scale.astype(np.float32)[..., None]
        if kind.offset == "min":
            groups += offset
        return groups.reshape(n, k)

    def widened(self, storage: str) -> PackedRows:
        """The same weights in a kind that :func:`join` gave for theirs."""
        old, new = STORAGES[self.storage], STORAGES[storage]
        if old == new:
            return self
        repeat = old.group // new.group
        scale, codes, offset = np.repeat(self.scale, repeat, axis=1), self.codes.astype(np.int16), self.offset
        if offset is not None:
            offset = np.repeat(offset, repeat, axis=1)
        if old.offset == "zero" and offset is not None:
            codes -= np.repeat(offset.astype(np.int16), new.group, axis=1)
            offset = None
        if new.offset == "min" and offset is None:
            offset = np.zeros_like(scale)
        codes += new.center - old.center
        return PackedRows(storage, codes.astype(np.uint8), scale, offset)


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack ``uint8[n, K]`` codes of 4 or 8 bits into ``uint32[n, K * bits / 32]``, the first lowest."""
    if bits == 4:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return np.ascontiguousarray(codes).view("<u4")


def unpack_codes(words: np.ndarray, bits: int) -> np.ndarray:
    """Undo :func:`pack_codes`: ``uint8[n, K]``."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(octets), -1)
