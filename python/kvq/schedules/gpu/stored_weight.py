"""Weights as they are stored, eight neighbouring inputs at a time: what products and embeddings read.

A code becomes a float32 where it stands in its word: masked, and under the exponent of ``2**23``, it is
``2**23 + code * 2**shift``, exactly. So a word is shifted once for as many codes as a mantissa holds, and the
powers of two go into what the number is multiplied by.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tvm.script import tirx as T
from tvm.script.ir_builder import tirx as builder

from kvq.errors import CompileError
from kvq.quantization.storage import STORAGES, Storage

#: Inputs that a thread takes at a time.
VECTOR = 8
#: 2**23 as float32, by its bits and its value; bits of a mantissa.
_MAGIC, _MAGIC_ZERO, _MANTISSA = 0x4B000000, float(2**23), 23


def code_shift(kind: Storage, number):
    """Bits by which code ``number`` (an int or int32 expression) of a vector is too large in ``numbers``."""
    if kind.bits is None:
        return 0
    in_word = (
        number % kind.codes_per_word if isinstance(number, int) else T.truncmod(number, kind.codes_per_word)
    )
    held = _MANTISSA // kind.bits
    return (in_word % held if isinstance(number, int) else T.truncmod(in_word, held)) * kind.bits


@dataclass(frozen=True)
class WeightVector:
    """Eight weights in registers: ``number * 2**-shift * scale + minimum``, the last two of a group.

    Attributes
    ----------
    kind : Storage
        How they are stored; :func:`code_shift` says the shifts.
    numbers : list of float32 expressions
        The weights, or their codes less the zero point, shifted; exact.
    scale : float32 variable or None
        None where weights are stored as they are.
    minimum : float32 variable or None
        None where it is 0.
    """

    kind: Storage
    numbers: list[Any]
    scale: Any = None
    minimum: Any = None

    def bound(self) -> WeightVector:
        """The same, with every number in a variable of its own: for several uses."""
        return replace(self, numbers=[T.bind(number) for number in self.numbers])

    def values(self) -> list[Any]:
        """The weights, float32 expressions."""
        if self.kind.bits is None:
            return self.numbers
        scales = [self.scale]
        for _ in range(_MANTISSA // self.kind.bits - 1):  # by factors that are exact in seven digits
            scales.append(T.bind(scales[-1] * T.float32(2.0**-self.kind.bits)))
        values = [
            number * scales[code_shift(self.kind, i) // self.kind.bits]
            for i, number in enumerate(self.numbers)
        ]
        return values if self.minimum is None else [value + self.minimum for value in values]


@dataclass(frozen=True)
class StoredWeight:
    """The tensors of a weight as arguments of a kernel.

    Attributes
    ----------
    kind : Storage
        How it is stored.
    values
        The weights ``[N, K]``, or their codes in words.
    scales, offsets
        ``float16[N, K / group]``; None where the storage has none.
    """

    kind: Storage
    values: Any
    scales: Any = None
    offsets: Any = None

    def read(self, row, vector) -> WeightVector:
        """Inputs ``8 * vector ..`` of a row."""
        if self.kind.bits is None:
            return self.read_apart(row, vector * VECTOR, 1)
        bits, words_of = self.kind.bits, self.kind.bits * VECTOR // 32
        words = [T.bind(self.values[row, vector * words_of + i]) for i in range(words_of)]
        group = vector if self.kind.group == VECTOR else T.truncdiv(vector, self.kind.group // VECTOR)
        scale = T.bind(T.cast(self.scales[row, group], "float32"))
        minimum = None
        if self.offsets is not None:
            offset = T.cast(self.offsets[row, group], "float32")
            # a zero point is a small number: its product with the scale is exact
            minimum = T.bind(offset if self.kind.offset == "min" else T.float32(0) - offset * scale)
        numbers = []
        for i in range(VECTOR):
            word, at = divmod(i, self.kind.codes_per_word)
            shift = code_shift(self.kind, i)
            down = bits * at - shift
            piece = T.shift_right(words[word], T.uint32(down)) if down else words[word]
            code = T.bitwise_and(piece, T.uint32((2**bits - 1) << shift))
            number = T.reinterpret("float32", T.bitwise_or(code, T.uint32(_MAGIC)))
            numbers.append(number - T.float32(_MAGIC_ZERO + self.kind.center * 2.0**shift))
        return WeightVector(self.kind, numbers, scale, minimum)

    def read_apart(self, row, first, apart: int) -> WeightVector:
        """Inputs ``first``, ``first + apart`` and so on of a row of unquantized weights, at most the last."""
        k = int(self.values.shape[1])
        columns = [first] + [first + i * apart for i in range(1, VECTOR)]
        if apart > 1:
            columns = [T.min(column, k - 1) for column in columns]
        return WeightVector(
            self.kind, [T.bind(T.cast(self.values[row, column], "float32")) for column in columns]
        )


def declare_weight(n_out: int, k: int, storage: str) -> StoredWeight:
    """Declare the tensors of a weight ``[n_out, k]`` as the kernel's next arguments.

    Raises
    ------
    CompileError
        If K is no multiple of 8.
    """
    if k % VECTOR:
        raise CompileError(f"a weight with {k} inputs cannot be compiled for a GPU: no multiple of {VECTOR}")
    kind = STORAGES[storage]
    if kind.bits is None:
        return StoredWeight(kind, builder.arg("w", T.Buffer((n_out, k), storage)))
    groups = (n_out, k // kind.group)
    codes = builder.arg("w", T.Buffer((n_out, k * kind.bits // 32), "uint32"))
    scales = builder.arg("s", T.Buffer(groups, "float16"))
    offsets = builder.arg("z", T.Buffer(groups, "float16")) if kind.offset is not None else None
    return StoredWeight(kind, codes, scales, offsets)
