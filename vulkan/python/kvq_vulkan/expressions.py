"""Expressions of lowered TIR to SPIR-V.

A value is a list of scalars, one a lane. SPIR-V's vectors end at four lanes and give nothing to arithmetic
that drivers do not find by themselves, so a vector is its lanes, but for runs in a workgroup's memory
(:mod:`.runs`).
"""

from __future__ import annotations

from typing import Any

from .arithmetic import BINARY, Arithmetic
from .intrinsics import call_scalar, is_shuffle, shuffle
from .memory import Array, View
from .runs import divide, run_of
from .scalar import BOOL, FLOAT32, UINT32, CodegenError, Scalar, lanes_of, scalar_of
from .spirv import Op

Value = list[int]


def name_of(node: Any) -> str:
    """The class of a node."""
    return type(node).__name__


class Expressions:
    """Emits expressions.

    Attributes
    ----------
    variables : dict
        Values of TIR's variables.
    buffers : dict
        Memory of TIR's buffers.
    """

    def __init__(self, arithmetic: Arithmetic, subgroup: int) -> None:
        self.arithmetic, self.module, self._subgroup = arithmetic, arithmetic.module, subgroup
        self.variables: dict[Any, Value] = {}
        self.buffers: dict[Any, Array | View] = {}

    def value(self, expr: Any) -> Value:
        """Emit an expression; its lanes.

        Raises
        ------
        CodegenError
            For what is not supported.
        """
        name = name_of(expr)
        if name in BINARY:
            return self._binary(name, expr)
        method = getattr(self, f"_{name}", None)
        if method is None:
            raise CodegenError(f"{name} is not supported: {expr}")
        return method(expr)

    def scalar(self, expr: Any) -> int:
        """Emit an expression of one lane."""
        (value,) = self.value(expr)
        return value

    def memory(self, buffer: Any) -> Array | View:
        """Where a buffer lives."""
        if buffer not in self.buffers:
            raise CodegenError(f"buffer {buffer.name} was not declared")
        return self.buffers[buffer]

    def places(self, memory: Array | View, indices: Any) -> list[list[int]]:
        """Where the element of each lane lies: an index, or in memory of vectors two."""
        if len(indices) != 1:
            raise CodegenError("a buffer has more than one dimension")
        if memory.run == 1:
            return [[index] for index in self.value(indices[0])]
        index, lanes = indices[0], lanes_of(indices[0])
        each = [index.base + lane * index.stride for lane in range(lanes)] if lanes > 1 else [index]
        return [[self.scalar(part) for part in divide(lane, memory.run)] for lane in each]

    def _IntImm(self, expr: Any) -> Value:
        return [self.arithmetic.constant(scalar_of(expr), int(expr.value))]

    def _FloatImm(self, expr: Any) -> Value:
        return [self.arithmetic.constant(scalar_of(expr), float(expr.value))]

    def _Var(self, expr: Any) -> Value:
        if expr not in self.variables:
            raise CodegenError(f"variable {expr.name} has no value")
        return self.variables[expr]

    def _binary(self, name: str, expr: Any) -> Value:
        if name in ("And", "Or") and lanes_of(expr) == 1 and _may_fault(expr.b):
            return self._short_circuit(name, expr)
        scalar = scalar_of(expr.a)
        if name in ("Add", "Sub") and scalar == FLOAT32 and (fused := self._multiply_add(name, expr)):
            return fused
        pairs = zip(self.value(expr.a), self.value(expr.b), strict=True)
        return [self.arithmetic.binary(name, scalar, a, b) for a, b in pairs]

    def _multiply_add(self, name: str, expr: Any) -> Value:
        """A product and a sum as one instruction; empty where there is no product.

        Drivers may fuse the two by themselves, but some do not where infinities and NaN must be kept.
        """
        leads = name_of(expr.a) == "Mul"
        product, other = (expr.a, expr.b) if leads else (expr.b, expr.a)
        if name_of(product) != "Mul":
            return []
        columns = [self.value(part) for part in (product.a, product.b, other)]
        if name == "Sub":
            turned = 2 if leads else 0  # a * b - c, c - a * b
            columns[turned] = [self.arithmetic.negative(FLOAT32, value) for value in columns[turned]]
        return [self.arithmetic.multiply_add(FLOAT32, *lane) for lane in zip(*columns, strict=True)]

    def _short_circuit(self, name: str, expr: Any) -> Value:
        """``a and b``, ``a or b`` where ``b`` must not run when ``a`` decides."""
        decided = self.arithmetic.constant(BOOL, name == "Or")
        if name == "And":
            return self._branch(BOOL, self.scalar(expr.a), lambda: self.value(expr.b), lambda: [decided])
        return self._branch(BOOL, self.scalar(expr.a), lambda: [decided], lambda: self.value(expr.b))

    def _branch(self, scalar: Scalar, condition: int, then: Any, otherwise: Any) -> Value:
        """Emit two blocks and join what they give."""
        module = self.module
        self.arithmetic.computes(scalar)
        labels = module.new_id(), module.new_id()
        merge = module.new_id()
        module.do(Op.SELECTION_MERGE, merge, 0)
        module.do(Op.BRANCH_CONDITIONAL, condition, *labels)
        results, ends = [], []
        for label, body in zip(labels, (then, otherwise), strict=True):
            with module.branch():
                module.begin_block(label)
                results.append(body())
                ends.append(module.block)
                module.do(Op.BRANCH, merge)
        module.begin_block(merge)
        type_id = self.arithmetic.type_id(scalar)
        return [module.emit(Op.PHI, type_id, a, ends[0], b, ends[1]) for a, b in zip(*results, strict=True)]

    def _Not(self, expr: Any) -> Value:
        return [self.arithmetic.invert(BOOL, a) for a in self.value(expr.a)]

    def _BitwiseNot(self, expr: Any) -> Value:
        return [self.arithmetic.invert(scalar_of(expr), a) for a in self.value(expr.a)]

    def _Cast(self, expr: Any) -> Value:
        source, target = scalar_of(expr.value), scalar_of(expr)
        return [self.arithmetic.cast(source, target, a) for a in self.value(expr.value)]

    def _Select(self, expr: Any) -> Value:
        conditions = self.value(expr.condition)
        a, b = self.value(expr.true_value), self.value(expr.false_value)
        conditions = conditions * len(a) if len(conditions) == 1 else conditions
        scalar = scalar_of(expr)
        return [self.arithmetic.select(scalar, *lane) for lane in zip(conditions, a, b, strict=True)]

    def _Ramp(self, expr: Any) -> Value:
        scalar = scalar_of(expr)
        base, stride = self.scalar(expr.base), self.scalar(expr.stride)
        out = [base]
        for _ in range(lanes_of(expr) - 1):
            out.append(self.arithmetic.binary("Add", scalar, out[-1], stride))
        return out

    def _Broadcast(self, expr: Any) -> Value:
        return self.value(expr.value) * lanes_of(expr)

    def _Shuffle(self, expr: Any) -> Value:
        lanes = [lane for vector in expr.vectors for lane in self.value(vector)]
        return [lanes[int(index)] for index in expr.indices]

    def _Let(self, expr: Any) -> Value:
        self.variables[expr.var] = self.value(expr.value)
        return self.value(expr.body)

    def _TensorLoad(self, expr: Any) -> Value:
        memory, run = self.memory(expr.source), run_of(expr.indices)
        if isinstance(memory, Array) and run is not None and run[1] == memory.run:
            return memory.load_run(self.scalar(divide(*run)[0]))
        return [memory.load(*place) for place in self.places(memory, expr.indices)]

    def _Call(self, expr: Any) -> Value:
        name, args = expr.op.name.split(".")[-1], list(expr.args)
        if name == "if_then_else":
            return self._if_then_else(expr, args)
        if name in ("call_pure_extern", "call_extern"):
            name, args = str(args[0].value), args[1:]
        scalar = scalar_of(expr)
        if is_shuffle(name):
            return self._warp_shuffle(name, scalar, args)
        columns = [self.value(arg) for arg in args]
        kinds = [scalar_of(arg) for arg in args]
        return [
            call_scalar(self.arithmetic, name, scalar, list(zip(kinds, lane, strict=True)))
            for lane in zip(*columns, strict=True)
        ]

    def _if_then_else(self, expr: Any, args: list[Any]) -> Value:
        condition, a, b = args
        return self._branch(
            scalar_of(expr), self.scalar(condition), lambda: self.value(a), lambda: self.value(b)
        )

    def _warp_shuffle(self, name: str, scalar: Scalar, args: list[Any]) -> Value:
        """``(mask, value, lane, width, warp size)``, of whole subgroups."""
        _, value, lane, width, _ = args
        if int(width) != self._subgroup:
            raise CodegenError(f"{name} of {width} lanes: the target's subgroups have {self._subgroup}")
        source = scalar_of(lane)
        other = self.arithmetic.cast(source, UINT32, self.scalar(lane))
        return [shuffle(self.arithmetic, name, scalar, a, other) for a in self.value(value)]


#: Fields of expressions that hold expressions.
_PARTS = ("a", "b", "value", "condition", "true_value", "false_value", "body", "base", "stride")


def _may_fault(expr: Any) -> bool:
    """Whether computing an expression that is not wanted may read where nothing is."""
    if name_of(expr) == "TensorLoad":
        return True
    parts = [getattr(expr, field) for field in _PARTS if hasattr(expr, field)]
    if name_of(expr) == "Call":
        parts += expr.args
    return any(_may_fault(part) for part in parts)
