"""int4 codes as operand A, as they are: their center and their scale act on the sums.

Where a sum has codes of one scale only, nothing but a mask is needed for each pair of them. A code's bits are
a denormal fp16 number, which tensor cores take exactly and at full speed; one in the second nibble counts
16-fold. bf16 has too few bits for that: there a code is put below 128.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T

from kvq.schedules.statements import put

from .mma import u32
from .weight_fragments import ZERO_CODE

_NIBBLES = 0x000F000F
#: 128 twice, in bf16, whose last place counts 1.
_POWER, _POWER_WORD = 128, 0x43004300


@dataclass(frozen=True)
class CodeSums:
    """What the sums of codes need.

    Attributes
    ----------
    center : float
        Times the sum of a row's inputs, where sums of the outputs 0 to 7 of a tile start.
    second : float
        How much larger all of that is for the outputs 8 to 15.
    unit : float
        What a sum of the first outputs counts.
    """

    center: float
    second: float
    unit: float

    def registers(self, word, out) -> list:
        """Operand A of a product: the four registers of a lane's word of codes."""
        for p in range(4):
            if self.second == 1:
                shifted = T.shift_right(word, u32(4 * p)) if p else word
                put(out, T.bitwise_or(T.bitwise_and(shifted, u32(_NIBBLES)), u32(_POWER_WORD)), p)
            else:
                shifted = T.shift_right(word, u32(8)) if p > 1 else word
                put(out, T.bitwise_and(shifted, u32(_NIBBLES << 4 * (p % 2))), p)
        return [out[p] for p in range(4)]


#: By the type of the operands.
CODE_SUMS = {
    "float16": CodeSums(center=-ZERO_CODE * 2.0**-24, second=16, unit=2.0**24),
    "bfloat16": CodeSums(center=-(_POWER + ZERO_CODE), second=1, unit=1),
}
