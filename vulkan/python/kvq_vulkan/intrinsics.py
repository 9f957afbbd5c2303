"""Calls in kernels: functions of numbers, by the names that TVM's lowering leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .arithmetic import Arithmetic
from .scalar import BOOL, FLOAT32, INT32, UINT32, CodegenError, Scalar
from .spirv import Capability, Glsl, Op
from .spirv.numbers import Scope

#: Functions that GLSL.std.450 has, computed in float32.
_GLSL = {
    "exp": Glsl.EXP,
    "exp2": Glsl.EXP2,
    "log": Glsl.LOG,
    "log2": Glsl.LOG2,
    "sqrt": Glsl.SQRT,
    "rsqrt": Glsl.INVERSE_SQRT,
    "sin": Glsl.SIN,
    "cos": Glsl.COS,
    "tan": Glsl.TAN,
    "atan": Glsl.ATAN,
    "sinh": Glsl.SINH,
    "cosh": Glsl.COSH,
    "tanh": Glsl.TANH,
    "pow": Glsl.POW,
    "fma": Glsl.FMA,
    "fabs": Glsl.F_ABS,
    "floor": Glsl.FLOOR,
    "ceil": Glsl.CEIL,
    "trunc": Glsl.TRUNC,
    "round": Glsl.ROUND,
    "nearbyint": Glsl.ROUND_EVEN,
}

_SHUFFLES = {
    "tvm_warp_shuffle": (Op.GROUP_NON_UNIFORM_SHUFFLE, Capability.GROUP_NON_UNIFORM_SHUFFLE),
    "tvm_warp_shuffle_xor": (Op.GROUP_NON_UNIFORM_SHUFFLE_XOR, Capability.GROUP_NON_UNIFORM_SHUFFLE),
    "tvm_warp_shuffle_up": (Op.GROUP_NON_UNIFORM_SHUFFLE_UP, Capability.GROUP_NON_UNIFORM_SHUFFLE_RELATIVE),
    "tvm_warp_shuffle_down": (
        Op.GROUP_NON_UNIFORM_SHUFFLE_DOWN,
        Capability.GROUP_NON_UNIFORM_SHUFFLE_RELATIVE,
    ),
}


def is_shuffle(name: str) -> bool:
    """Whether a call exchanges registers within a subgroup."""
    return name in _SHUFFLES


def call_scalar(arithmetic: Arithmetic, name: str, scalar: Scalar, args: Sequence[tuple[Scalar, int]]) -> int:
    """The result, of type ``scalar``, of the function ``name`` on (type, value) of its arguments.

    Raises
    ------
    CodegenError
        For a function that is not known.
    """
    values = [value for _, value in args]
    if name in _GLSL or (name.endswith("f") and name[:-1] in _GLSL):
        instruction = _GLSL[name if name in _GLSL else name[:-1]]
        wide = [arithmetic.cast(source, FLOAT32, value) for source, value in args]
        result = arithmetic.module.glsl(instruction, arithmetic.type_id(FLOAT32), *wide)
        return arithmetic.cast(FLOAT32, scalar, result)
    if name in _SPECIAL:
        return _SPECIAL[name](arithmetic, scalar, args)
    if name in ("likely", "tvm_thread_invariant"):
        return values[0]
    raise CodegenError(f"function {name} is not supported")


def shuffle(arithmetic: Arithmetic, name: str, scalar: Scalar, value: int, lane: int) -> int:
    """A value of another lane of the subgroup: ``lane``, or that far away."""
    op, capability = _SHUFFLES[name]
    module = arithmetic.module
    module.require(Capability.GROUP_NON_UNIFORM)
    module.require(capability)
    arithmetic.computes(scalar)
    scope = arithmetic.constant(UINT32, Scope.SUBGROUP)
    return module.emit(op, arithmetic.type_id(scalar), scope, value, lane)


def _popcount(arithmetic: Arithmetic, scalar: Scalar, args: Sequence[tuple[Scalar, int]]) -> int:
    source, value = args[0]
    wide = arithmetic.cast(source, UINT32, value)
    count = arithmetic.module.emit(Op.BIT_COUNT, arithmetic.type_id(INT32), wide)
    return arithmetic.cast(INT32, scalar, count)


def _clz(arithmetic: Arithmetic, scalar: Scalar, args: Sequence[tuple[Scalar, int]]) -> int:
    source, value = args[0]
    if source.bits != 32:
        raise CodegenError("clz of other than 32 bits is not supported")
    bits = arithmetic.cast(source, UINT32, value)
    highest = arithmetic.module.glsl(Glsl.FIND_U_MSB, arithmetic.type_id(INT32), bits)  # -1 of zero
    zeros = arithmetic.binary("Sub", INT32, arithmetic.constant(INT32, 31), highest)
    return arithmetic.cast(INT32, scalar, zeros)


def _sigmoid(arithmetic: Arithmetic, scalar: Scalar, args: Sequence[tuple[Scalar, int]]) -> int:
    source, value = args[0]
    one = arithmetic.constant(FLOAT32, 1.0)
    wide = arithmetic.cast(source, FLOAT32, value)
    negative = arithmetic.binary("Sub", FLOAT32, arithmetic.constant(FLOAT32, 0.0), wide)
    exp = arithmetic.module.glsl(Glsl.EXP, arithmetic.type_id(FLOAT32), negative)
    result = arithmetic.binary("Div", FLOAT32, one, arithmetic.binary("Add", FLOAT32, one, exp))
    return arithmetic.cast(FLOAT32, scalar, result)


def _is_nan(arithmetic: Arithmetic, _scalar: Scalar, args: Sequence[tuple[Scalar, int]]) -> int:
    source, value = args[0]
    arithmetic.computes(source)
    return arithmetic.module.emit(Op.IS_NAN, arithmetic.type_id(BOOL), value)


def _reinterpret(arithmetic: Arithmetic, scalar: Scalar, args: Sequence[tuple[Scalar, int]]) -> int:
    source, value = args[0]
    return arithmetic.reinterpret(source, scalar, value)


_Special = Callable[[Arithmetic, Scalar, Sequence[tuple[Scalar, int]]], int]
_SPECIAL: dict[str, _Special] = {
    "popcount": _popcount,
    "clz": _clz,
    "sigmoid": _sigmoid,
    "isnan": _is_nan,
    "reinterpret": _reinterpret,
}
