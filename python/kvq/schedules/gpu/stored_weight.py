"""Weights as they are stored, eight neighbouring inputs at a time: what products and embeddings read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tvm.script import tirx as T
from tvm.script.ir_builder import tirx as builder

from kvq.errors import CompileError
from kvq.quantization.storage import STORAGES, Storage

#: Inputs that a thread takes at a time.
VECTOR = 8
#: float32 whose lowest bits are the code: 2**23 + code. Exact, and faster than a conversion.
_MAGIC, _MAGIC_ZERO = 0x4B000000, float(2**23)


@dataclass(frozen=True)
class WeightVector:
    """Eight weights in registers: ``number * scale + minimum``, the last two of a group and maybe absent.

    Attributes
    ----------
    numbers : list of float32 expressions
        The weights, or their codes less the zero point; exact.
    scale, minimum : float32 variables or None
    """

    numbers: list[Any]
    scale: Any = None
    minimum: Any = None

    def bound(self) -> WeightVector:
        """The same, with every number in a variable of its own: for several uses."""
        return replace(self, numbers=[T.bind(number) for number in self.numbers])

    def value(self, i: int):
        """Weight ``i``."""
        value = self.numbers[i] if self.scale is None else self.numbers[i] * self.scale
        return value if self.minimum is None else value + self.minimum


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
        offset = None if self.offsets is None else T.bind(T.cast(self.offsets[row, group], "float32"))
        numbers = []
        for i in range(VECTOR):
            word, at = divmod(i, self.kind.codes_per_word)
            code = T.shift_right(words[word], T.uint32(bits * at)) if at else words[word]
            code = T.bitwise_and(code, T.uint32(2**bits - 1))
            number = T.reinterpret("float32", T.bitwise_or(code, T.uint32(_MAGIC)))
            number = number - T.float32(_MAGIC_ZERO + self.kind.center)
            numbers.append(number - offset if self.kind.offset == "zero" else number)
        return WeightVector(numbers, scale, offset if self.kind.offset == "min" else None)

    def read_apart(self, row, first, apart: int) -> WeightVector:
        """Inputs ``first``, ``first + apart`` and so on of a row of unquantized weights, at most the last."""
        k = int(self.values.shape[1])
        columns = [first] + [first + i * apart for i in range(1, VECTOR)]
        if apart > 1:
            columns = [T.min(column, k - 1) for column in columns]
        return WeightVector([T.bind(T.cast(self.values[row, column], "float32")) for column in columns])


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
