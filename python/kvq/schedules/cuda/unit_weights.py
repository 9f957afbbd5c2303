"""A lane's weights of a unit, as registers of operand A in fp16 or bf16.

A code becomes a number without a conversion: its bits are the lowest of a mantissa, that of a power of two
whose last place counts 1; then the power and the code of 0 are taken off, exactly. fp16 has ten such bits, so
that two nibbles of a half can be used where they are. bf16 has seven: every nibble is shifted to the lowest
place. The scale multiplies last, which rounds once.
"""

from __future__ import annotations

import numpy as np
from tvm.script import tirx as T

from .mma import bits_or, bytes_of, emit, u32
from .weight_fragments import ZERO_CODE

_LOW_NIBBLES, _HIGH_NIBBLES = 0x000F000F, 0x00F000F0


def _halves(value: float) -> int:
    """The word of two equal fp16 numbers."""
    half = int(np.float16(value).view(np.uint16))
    return half << 16 | half


def _bhalves(value: float) -> int:
    """The word of two equal bf16 numbers, for a value that is one."""
    half = int(np.float32(value).view(np.uint32)) >> 16
    return half << 16 | half


#: 1024, and 128: the powers of two that codes are put below.
_MAGIC = {"float16": _halves(1024), "bfloat16": _bhalves(128)}
_LOW_ZERO = _halves(1024 + ZERO_CODE)
#: A code in the second nibble counts 16-fold: times 1/16, minus 1024/16 and the zero code.
_SIXTEENTH, _HIGH_ZERO = _halves(1 / 16), _halves(-(64 + ZERO_CODE))
#: Of bf16 only the fused multiply-add is there before sm_90; adding -0 changes nothing.
_ONE, _ZERO, _NOTHING = _bhalves(1), _bhalves(-(128 + ZERO_CODE)), _bhalves(-0.0)


class UnitWeights:
    """A lane's weights of one unit.

    Parameters
    ----------
    storage : str
        One of :data:`~kvq.schedules.cuda.weight_fragments.KINDS`.
    words : buffer
        uint32: the lane's words from ``at`` on; the scales' word of an int4 unit is ``words[scale_at]``.
    dtype : str
        Of the operand, and of what is stored beside codes: ``float16`` or ``bfloat16``.
    """

    def __init__(self, storage: str, words, at: int, scale_at: int, dtype: str = "float16") -> None:
        self.storage, self.words, self.at, self.dtype = storage, words, at, dtype
        if storage == "int4":
            self.scales, self.magic = T.alloc_local([2], "uint32"), T.alloc_local([1], "uint32")
            emit(T.ptx["mov.b32"](self.magic[0], u32(_MAGIC[dtype])))
            bytes_of(self.scales, 0, words[scale_at], u32(0), 0x1010)
            bytes_of(self.scales, 1, words[scale_at], u32(0), 0x3232)

    def registers(self, step: int, out, first: int = 0) -> list:
        """The four registers of product ``step``; ``out[first : first + 4]`` may hold them."""
        if self.storage != "int4":
            return [self.words[self.at + 4 * step + p] for p in range(4)]
        codes = self._fp16 if self.dtype == "float16" else self._bf16
        codes(self.words[self.at + step], out, first)
        return [out[first + p] for p in range(4)]

    def _fp16(self, word, out, first: int) -> None:
        for half in range(2):
            source = T.shift_right(word, u32(8)) if half else word
            low, high = first + 2 * half, first + 2 * half + 1
            bits_or(out, low, source, _LOW_NIBBLES, self.magic[0])
            bits_or(out, high, source, _HIGH_NIBBLES, self.magic[0])
            emit(T.ptx["sub.rn.f16x2"](out[low], out[low], u32(_LOW_ZERO)))
            emit(T.ptx["fma.rn.f16x2"](out[high], out[high], u32(_SIXTEENTH), u32(_HIGH_ZERO)))
            for p in (low, high):
                emit(T.ptx["mul.rn.f16x2"](out[p], out[p], self.scales[p % 2]))

    def _bf16(self, word, out, first: int) -> None:
        for p in range(4):
            at = first + p
            bits_or(out, at, T.shift_right(word, u32(4 * p)) if p else word, _LOW_NIBBLES, self.magic[0])
            emit(T.ptx["fma.rn.bf16x2"](out[at], out[at], u32(_ONE), u32(_ZERO)))
            emit(T.ptx["fma.rn.bf16x2"](out[at], out[at], self.scales[p % 2], u32(_NOTHING)))
