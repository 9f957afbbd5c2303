"""Operations on scalars: what TVM's operators mean in SPIR-V, by the type of their operands."""

from __future__ import annotations

import struct

import numpy as np

from .scalar import BOOL, FLOAT32, INT32, UINT32, CodegenError, Scalar
from .spirv import Capability, Glsl, ModuleBuilder, Op

#: Operators by the kind of their operands: signed, unsigned, float.
_ARITHMETIC = {
    "Add": (Op.I_ADD, Op.I_ADD, Op.F_ADD),
    "Sub": (Op.I_SUB, Op.I_SUB, Op.F_SUB),
    "Mul": (Op.I_MUL, Op.I_MUL, Op.F_MUL),
    "Div": (Op.S_DIV, Op.U_DIV, Op.F_DIV),
    "BitwiseAnd": (Op.BITWISE_AND, Op.BITWISE_AND, None),
    "BitwiseOr": (Op.BITWISE_OR, Op.BITWISE_OR, None),
    "BitwiseXor": (Op.BITWISE_XOR, Op.BITWISE_XOR, None),
    "LShift": (Op.SHIFT_LEFT_LOGICAL, Op.SHIFT_LEFT_LOGICAL, None),
    "RShift": (Op.SHIFT_RIGHT_ARITHMETIC, Op.SHIFT_RIGHT_LOGICAL, None),
}
#: A comparison with NaN is false, but for "not equal".
_COMPARISONS = {
    "LT": (Op.S_LESS_THAN, Op.U_LESS_THAN, Op.F_ORD_LESS_THAN),
    "LE": (Op.S_LESS_THAN_EQUAL, Op.U_LESS_THAN_EQUAL, Op.F_ORD_LESS_THAN_EQUAL),
    "GT": (Op.S_GREATER_THAN, Op.U_GREATER_THAN, Op.F_ORD_GREATER_THAN),
    "GE": (Op.S_GREATER_THAN_EQUAL, Op.U_GREATER_THAN_EQUAL, Op.F_ORD_GREATER_THAN_EQUAL),
    "EQ": (Op.I_EQUAL, Op.I_EQUAL, Op.F_ORD_EQUAL),
    "NE": (Op.I_NOT_EQUAL, Op.I_NOT_EQUAL, Op.F_UNORD_NOT_EQUAL),
}
#: Of a number and NaN these give the number, as C's fmin and fmax do.
_EXTREMES = {
    "Min": (Glsl.S_MIN, Glsl.U_MIN, Glsl.N_MIN),
    "Max": (Glsl.S_MAX, Glsl.U_MAX, Glsl.N_MAX),
}
_LOGIC = {"And": Op.LOGICAL_AND, "Or": Op.LOGICAL_OR, "EQ": Op.LOGICAL_EQUAL, "NE": Op.LOGICAL_NOT_EQUAL}
_COLUMN = {"int": 0, "uint": 1, "float": 2}

BINARY = {*_ARITHMETIC, *_COMPARISONS, *_EXTREMES, "And", "Or", "Mod", "FloorDiv", "FloorMod"}


class Arithmetic:
    """Emits operations on scalars into a module."""

    def __init__(self, module: ModuleBuilder) -> None:
        self.module = module

    def type_id(self, scalar: Scalar) -> int:
        """The scalar's type."""
        if scalar.kind == "bool":
            return self.module.bool_type()
        if scalar.is_float:
            return self.module.float_type(scalar.bits)
        return self.module.int_type(scalar.bits, scalar.is_signed)

    def computes(self, scalar: Scalar) -> None:
        """Declare that the kernel computes in the type, or keeps it in variables of its own."""
        if scalar.is_float and scalar.bits == 16:
            self.module.require(Capability.FLOAT16)
        elif scalar.bits == 16:
            self.module.require(Capability.INT16)
        elif scalar.bits == 8:
            self.module.require(Capability.INT8)

    def constant(self, scalar: Scalar, value: float) -> int:
        """A constant; integers modulo their width."""
        if scalar.kind == "bool":
            return self.module.bool_constant(bool(value))
        self.computes(scalar)
        if scalar.is_float:
            bits = np.array(value, f"f{scalar.bits // 8}").tobytes()
            return self.module.constant(self.type_id(scalar), struct.unpack("<I", bits.ljust(4, b"\0"))[0])
        word = int(value) & ((1 << scalar.bits) - 1)
        if scalar.is_signed and word >> (scalar.bits - 1):
            word |= 0xFFFFFFFF & ~((1 << scalar.bits) - 1)  # a narrow constant's sign fills its word
        return self.module.constant(self.type_id(scalar), word)

    def binary(self, name: str, scalar: Scalar, a: int, b: int) -> int:
        """The result of TVM's node ``name`` on operands of type ``scalar``."""
        emit, type_id = self.module.emit, self.type_id(scalar)
        if scalar.kind == "bool":
            if name not in _LOGIC:
                raise CodegenError(f"{name} of bool is not supported")
            return emit(_LOGIC[name], type_id, a, b)
        self.computes(scalar)
        column = _COLUMN[scalar.kind]
        if name in _COMPARISONS:
            return emit(_COMPARISONS[name][column], self.type_id(BOOL), a, b)
        if name in _EXTREMES:
            return self.module.glsl(_EXTREMES[name][column], type_id, a, b)
        op = _ARITHMETIC[name][column] if name in _ARITHMETIC else None
        if op is not None:
            return emit(op, type_id, a, b)
        if scalar.kind == "uint" and name in ("Mod", "FloorMod"):
            return emit(Op.U_MOD, type_id, a, b)
        if scalar.kind == "uint" and name == "FloorDiv":
            return emit(Op.U_DIV, type_id, a, b)
        if scalar.kind == "int" and name == "Mod":
            # Vulkan leaves the signed remainder of negative operands undefined
            quotient = emit(Op.S_DIV, type_id, a, b)
            return emit(Op.I_SUB, type_id, a, emit(Op.I_MUL, type_id, quotient, b))
        raise CodegenError(f"{name} of {scalar.kind}{scalar.bits} is not supported")

    def negative(self, scalar: Scalar, a: int) -> int:
        """``-a`` of a float."""
        return self.module.emit(Op.F_NEGATE, self.type_id(scalar), a)

    def multiply_add(self, scalar: Scalar, a: int, b: int, c: int) -> int:
        """``a * b + c`` of floats, rounded once where the device does so."""
        return self.module.glsl(Glsl.FMA, self.type_id(scalar), a, b, c)

    def invert(self, scalar: Scalar, a: int) -> int:
        """``not a`` of bool, all bits turned of integers."""
        self.computes(scalar)
        op = Op.LOGICAL_NOT if scalar.kind == "bool" else Op.NOT
        return self.module.emit(op, self.type_id(scalar), a)

    def select(self, scalar: Scalar, condition: int, a: int, b: int) -> int:
        """``a`` where the condition holds, else ``b``; both are computed."""
        self.computes(scalar)
        return self.module.emit(Op.SELECT, self.type_id(scalar), condition, a, b)

    def cast(self, source: Scalar, target: Scalar, a: int) -> int:
        """The value in another type, as C converts it."""
        emit, type_id = self.module.emit, self.type_id(target)
        if source == target:
            return a
        if target.kind == "bool":
            return self.binary("NE", source, a, self.constant(source, 0))
        if source.kind == "bool":
            return self.select(target, a, self.constant(target, 1), self.constant(target, 0))
        if source.is_float and target.is_float:
            return emit(Op.F_CONVERT, type_id, a)
        if target.is_float:
            if target.bits == 16:
                self.computes(target)
            return emit(Op.CONVERT_S_TO_F if source.is_signed else Op.CONVERT_U_TO_F, type_id, a)
        if source.is_float:
            if source.bits == 16:
                a = self.cast(source, FLOAT32, a)
            wide = INT32 if target.is_signed else UINT32
            op = Op.CONVERT_F_TO_S if target.is_signed else Op.CONVERT_F_TO_U
            return self.cast(wide, target, emit(op, self.type_id(wide), a))
        if source.bits == target.bits:
            self.computes(source)
            return emit(Op.BITCAST, type_id, a)
        if source.is_signed or (target.is_signed and target.bits < source.bits):
            return emit(Op.S_CONVERT, type_id, a)
        unsigned = emit(Op.U_CONVERT, self.type_id(Scalar("uint", target.bits)), a)
        if target.kind == "uint":
            return unsigned
        self.computes(target)
        return emit(Op.BITCAST, type_id, unsigned)

    def reinterpret(self, source: Scalar, target: Scalar, a: int) -> int:
        """The value's bits as another type of the same width."""
        if source.bits != target.bits:
            raise CodegenError(f"reinterpret of {source.bits} bits as {target.bits} is not supported")
        self.computes(source)
        self.computes(target)
        return a if source == target else self.module.emit(Op.BITCAST, self.type_id(target), a)
