"""The host's part of a GPU kernel in Python: which device functions a call launches, with what arguments.

A PrimFunc may launch several device functions, under conditions. TVM splits them from the code of the host,
which is kept here as it stands after the split and evaluated for every call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm.ir import Call
from tvm.ir.instrument import pass_instrument
from tvm.sym import Analyzer

from kvq.compiler.gpu_target import GpuTarget

#: What TVM writes before each device function; for WebGPU twice, between rules.
_HEADING = r"^// Function: (\w+)\n(?!//-+\n// Function)"


@dataclass(frozen=True)
class Launch:
    """One launch of a device function.

    Attributes
    ----------
    name : str
        The function.
    arrays : list of numpy.ndarray
        Its buffers, in order.
    scalars : list of (value, dtype)
        What follows them.
    grid, block : tuple of int
        Workgroups, and threads of one, along x, y and z.
    """

    name: str
    arrays: list[np.ndarray]
    scalars: list[tuple[int | float, str]]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]


class HostCode:
    """A kernel's host function, and ``sources``, those of its device functions by name.

    Parameters
    ----------
    func : tirx.PrimFunc
        The kernel.
    target : GpuTarget
        What it is compiled for.
    """

    def __init__(self, func: tirx.PrimFunc, target: GpuTarget) -> None:
        split: dict[str, tvm.IRModule] = {}

        @pass_instrument
        class KeepSplit:
            def run_after_pass(self, mod: tvm.IRModule, info: Any) -> None:
                if info.name == "tirx.SplitHostDevice" and mod.functions:
                    split["module"] = mod

        module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        with tvm.transform.PassContext(instruments=[KeepSplit()]):
            built = tvm.compile(module, target=target.target, tir_pipeline=target.tir_pipeline)
        (device,) = built.mod.imports
        _, *parts = re.split(_HEADING, device.inspect_source(), flags=re.M)
        self.sources: dict[str, str] = dict(zip(parts[::2], parts[1::2], strict=True))
        self._main = split["module"]["main"]

    def launches(self, *arguments: np.ndarray | int | float) -> Iterator[Launch]:
        """What a call with these arguments launches, in order.

        Raises
        ------
        ValueError
            If an argument is not what the kernel takes.
        """
        yield from _Call(self._main, arguments).run()


class _Call:
    """One call: the values of the host's variables."""

    def __init__(self, func: tirx.PrimFunc, arguments: tuple[Any, ...]) -> None:
        self.body = func.body
        self.known: set[Any] = set()
        self.analyzer = Analyzer()
        self.arrays: dict[Any, np.ndarray] = {}
        if len(func.params) != len(arguments):
            raise ValueError(f"{len(arguments)} arguments for {list(func.params)}")
        for param, value in zip(func.params, arguments, strict=True):
            if isinstance(value, np.ndarray):
                self._take_array(param, value)
            else:
                self._bind(param, value)

    def _bind(self, variable: Any, value: int | float) -> None:
        self.analyzer.bind(variable, tirx.const(value, str(variable.ty.dtype)))
        self.known.add(variable)

    def _take_array(self, param: Any, array: np.ndarray) -> None:
        kind = param.ty
        if array.dtype != np.dtype(str(kind.dtype)) or not array.flags.c_contiguous:
            raise ValueError(f"{param}: a contiguous array of {kind.dtype}, not of {array.dtype}")
        if array.ndim != len(kind.shape):
            raise ValueError(f"{param}: shape {array.shape} where {list(kind.shape)} is taken")
        self.arrays[param] = array
        for size, extent in zip(array.shape, kind.shape, strict=True):
            if isinstance(extent, tirx.Var) and extent not in self.known:
                self._bind(extent, size)
            elif self.number(extent) != size:
                raise ValueError(f"{param}: shape {array.shape} where {list(kind.shape)} is taken")

    def number(self, expression: Any) -> int | float:
        """The value of an expression of the host's variables."""
        if isinstance(expression, int):
            return expression
        value = self.analyzer.simplify(expression)
        if not isinstance(value, tirx.IntImm | tirx.FloatImm):
            raise NotImplementedError(f"the host computes {expression}")
        return value.value

    def run(self) -> Iterator[Launch]:
        yield from self._statement(self.body)

    def _statement(self, node: Any) -> Iterator[Launch]:
        if isinstance(node, tirx.SeqStmt):
            for part in node.seq:
                yield from self._statement(part)
        elif isinstance(node, tirx.AttrStmt):
            yield from self._statement(node.body)
        elif isinstance(node, tirx.Bind):
            self._bind(node.var, self.number(node.value))
        elif isinstance(node, tirx.DeclBuffer):
            self.arrays[node.buffer] = self._array(node.data)
        elif isinstance(node, tirx.IfThenElse):
            taken = node.then_case if self.number(node.condition) else node.else_case
            if taken is not None:
                yield from self._statement(taken)
        elif isinstance(node, tirx.Evaluate) and isinstance(node.value, Call):
            yield self._launch(node.value)
        elif not isinstance(node, tirx.Evaluate):
            raise NotImplementedError(f"the host does {type(node).__name__}")

    def _array(self, data: Call) -> np.ndarray:
        """The array behind the pointer of a buffer."""
        return self.arrays[data.args[0]]

    def _launch(self, call: Call) -> Launch:
        name, *arguments = call.args
        tags = [str(tag) for tag in call.attrs.launch_params]
        arguments, extents = arguments[: -len(tags)], arguments[-len(tags) :]
        sizes = {tag: int(self.number(extent)) for tag, extent in zip(tags, extents, strict=True)}
        arrays, scalars = [], []
        for value in arguments:
            if isinstance(value, Call) and value.op.name == "tirx.buffer_data":
                arrays.append(self._array(value))
            else:
                scalars.append((self.number(value), str(value.ty.dtype)))
        grid, block = (
            tuple(sizes.get(f"{kind}.{axis}", 1) for axis in "xyz") for kind in ("blockIdx", "threadIdx")
        )
        return Launch(str(name.value), arrays, scalars, grid, block)
