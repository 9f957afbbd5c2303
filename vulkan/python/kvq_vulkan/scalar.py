"""Scalar types as kernels compute with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm

#: TVM's type codes.
_CODES = {0: "int", 1: "uint", 2: "float", 6: "bool"}


class CodegenError(RuntimeError):
    """A kernel says something that cannot be said in SPIR-V here."""


@dataclass(frozen=True)
class Scalar:
    """A scalar type.

    Attributes
    ----------
    kind : str
        ``int``, ``uint``, ``float`` or ``bool``.
    bits : int
    """

    kind: str
    bits: int

    @classmethod
    def of(cls, dtype: str) -> Scalar:
        """The scalar of a TVM type, vectors by their element.

        int64 is computed as int32, as WGSL does: in these kernels it is sizes and index arithmetic, and no
        buffer that Vulkan binds has more elements than int32 counts.

        Raises
        ------
        CodegenError
            For a type without a counterpart.
        """
        parsed = tvm.DataType(dtype)
        kind, bits = _CODES.get(int(parsed.type_code)), int(parsed.bits)
        if kind == "bool":
            return BOOL
        if kind in ("int", "uint") and bits == 64:
            return cls(kind, 32)
        if kind is None or bits not in (8, 16, 32) or (kind == "float" and bits == 8):
            raise CodegenError(f"type {dtype} is not supported")
        return cls(kind, bits)

    @property
    def size(self) -> int:
        """Bytes in a buffer."""
        return max(1, self.bits // 8)

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_signed(self) -> bool:
        return self.kind == "int"


BOOL = Scalar("bool", 1)
INT32 = Scalar("int", 32)
UINT32 = Scalar("uint", 32)
FLOAT32 = Scalar("float", 32)
FLOAT16 = Scalar("float", 16)


def scalar_of(expr: Any) -> Scalar:
    """The scalar type of an expression."""
    return Scalar.of(str(expr.ty))


def lanes_of(expr: Any) -> int:
    """Elements of an expression's value: 1 unless it is a vector."""
    return int(tvm.DataType(str(expr.ty)).lanes)
