"""A lowered device function of TIR to a SPIR-V module, and what the runtime must know to launch it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .arithmetic import Arithmetic
from .expressions import Expressions, name_of
from .memory import Array, StorageBuffer
from .runs import loaded_runs
from .scalar import FLOAT32, INT32, UINT32, CodegenError, Scalar, scalar_of
from .spirv import Capability, ModuleBuilder, Op, StorageClass
from .spirv.numbers import BARRIER_SEMANTICS, BuiltIn, ExecutionMode, Scope

#: Loop control "unroll".
_UNROLL = 1
_UNROLLED = 3
_AXES = "xyz"


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes
    ----------
    name : str
        Of the function, and of the entry point.
    arguments : str
        A letter for each argument: ``r`` a buffer that is read, ``w`` one that is written, ``i`` an integer,
        ``f`` a float. Scalars are push constants of 4 bytes each.
    grid : str
        A letter for each launch parameter: the axis ``x``, ``y`` or ``z`` of the grid, ``-`` for threads,
        which the module fixes.
    shared_bytes : int
        Memory of a workgroup.
    threads : tuple of int
        Threads of a workgroup along each axis.
    subgroup : int
        Lanes that a subgroup must have; 0 if that does not matter.
    spirv : bytes
    """

    name: str
    arguments: str
    grid: str
    shared_bytes: int
    threads: tuple[int, int, int]
    subgroup: int
    spirv: bytes


def compile_kernel(name: str, func: Any) -> Kernel:
    """Compile a device function as TVM's lowering leaves it.

    Raises
    ------
    CodegenError
        For what is not supported, with the kernel's name.
    """
    try:
        return _Translation(name, func).kernel()
    except CodegenError as error:
        raise CodegenError(f"Vulkan kernel {name}: {error}") from None


class _Translation:
    """The translation of one function."""

    def __init__(self, name: str, func: Any) -> None:
        self.name, self.func = name, func
        self.module = ModuleBuilder()
        self.arithmetic = Arithmetic(self.module)
        self.subgroup = int(func.attrs["target"].attrs.get("thread_warp_size", 1))
        self.expressions = Expressions(self.arithmetic, self.subgroup)
        self.value, self.scalar = self.expressions.value, self.expressions.scalar
        self.threads = [1, 1, 1]
        self.shared_bytes = 0
        self.buffers: dict[Any, StorageBuffer] = {}
        self.runs = loaded_runs(func.body)
        self.builtins: dict[BuiltIn, int] = {}

    def kernel(self) -> Kernel:
        """Translate."""
        letters = self._parameters()
        self._statement(self.func.body)
        arguments = ""
        for param, letter in zip(self.func.params, letters, strict=True):
            buffer = self.buffers.get(param)
            if buffer is not None:
                buffer.finish()
                letter = "w" if buffer.written else "r"
            arguments += letter
        tags = [str(tag) for tag in self.func.attrs["tirx.kernel_launch_params"]]
        for tag in tags:
            if not tag.startswith(("blockIdx.", "threadIdx.")):
                raise CodegenError(f"launch parameter {tag} is not supported")
        grid = "".join(tag[-1] if tag.startswith("blockIdx.") else "-" for tag in tags)
        threads = (self.threads[0], self.threads[1], self.threads[2])
        shuffles = self.module.requires(Capability.GROUP_NON_UNIFORM)
        subgroup = self.subgroup if shuffles else 0
        self._float_modes()
        spirv = self.module.finish(self.name, threads)
        return Kernel(self.name, arguments, grid, self.shared_bytes, threads, subgroup, spirv)

    def _float_modes(self) -> None:
        """Ask for IEEE's rounding and special values; the runtime drops what a device does not offer."""
        module = self.module
        half = module.requires(Capability.FLOAT16) or module.requires(Capability.STORAGE_BUFFER_16BIT_ACCESS)
        for bits in (16, 32) if half else (32,):
            module.require_mode(ExecutionMode.ROUNDING_MODE_RTE, bits, Capability.ROUNDING_MODE_RTE)
            module.require_mode(
                ExecutionMode.SIGNED_ZERO_INF_NAN_PRESERVE, bits, Capability.SIGNED_ZERO_INF_NAN_PRESERVE
            )
        if half:
            module.require_mode(ExecutionMode.DENORM_PRESERVE, 16, Capability.DENORM_PRESERVE)

    def _parameters(self) -> str:
        """Declare the arguments; a letter for each, ``b`` for buffers."""
        restrict = bool(self.func.attrs.get("tirx.noalias", False))
        letters, members = "", []
        for param in self.func.params:
            if name_of(param.ty) == "PointerType":
                self.buffers[param] = StorageBuffer(self.arithmetic, len(self.buffers), restrict)
                letters += "b"
                continue
            scalar = scalar_of(param)
            letters += "f" if scalar.is_float else "i"
            members.append((param, scalar, FLOAT32 if scalar.is_float else INT32))
        if not members:
            return letters
        types = [self.arithmetic.type_id(stored) for _, _, stored in members]
        block = self.module.push_constants(types)
        for index, (param, scalar, stored) in enumerate(members):
            type_id = self.arithmetic.type_id(stored)
            pointer_type = self.module.pointer_type(StorageClass.PUSH_CONSTANT, type_id)
            number = self.arithmetic.constant(UINT32, index)
            pointer = self.module.emit(Op.ACCESS_CHAIN, pointer_type, block, number)
            value = self.module.emit(Op.LOAD, type_id, pointer)
            self.expressions.variables[param] = [self.arithmetic.cast(stored, scalar, value)]
        return letters

    def _statement(self, stmt: Any) -> None:
        method = getattr(self, f"_{name_of(stmt)}", None)
        if method is None:
            raise CodegenError(f"statement {name_of(stmt)} is not supported")
        method(stmt)

    def _SeqStmt(self, stmt: Any) -> None:
        for part in stmt.seq:
            self._statement(part)

    def _Bind(self, stmt: Any) -> None:
        self.expressions.variables[stmt.var] = self.value(stmt.value)

    def _DeclBuffer(self, stmt: Any) -> None:
        source, buffer = stmt.data, stmt.buffer
        scalar = Scalar.of(str(buffer.dtype))
        if source in self.buffers:
            self.expressions.buffers[buffer] = self.buffers[source].view(scalar)
            return
        memory = next(
            (memory for known, memory in self.expressions.buffers.items() if source.same_as(known.data)), None
        )
        if memory is None or memory.scalar != scalar:
            raise CodegenError(f"buffer {buffer.name} is a view that cannot be had")
        self.expressions.buffers[buffer] = memory

    def _AllocBuffer(self, stmt: Any) -> None:
        buffer = stmt.buffer
        scalar, scope = Scalar.of(str(buffer.dtype)), str(buffer.scope())
        length = 1
        for extent in buffer.shape:
            length *= int(extent)
        if scope == "shared":
            self.shared_bytes += length * max(scalar.size, 1)
        elif scope != "local":
            raise CodegenError(f"memory of scope {scope!r} is not supported")
        storage = StorageClass.WORKGROUP if scope == "shared" else StorageClass.FUNCTION
        run = self.runs.get(buffer, 1) if scope == "shared" else 1
        run = run if length % run == 0 else 1
        self.expressions.buffers[buffer] = Array(self.arithmetic, scalar, length, storage, run)

    def _BufferStore(self, stmt: Any) -> None:
        memory = self.expressions.memory(stmt.buffer)
        values, places = self.value(stmt.value), self.expressions.places(memory, stmt.indices)
        for place, value in zip(places, values, strict=True):
            memory.store(value, *place)

    def _For(self, stmt: Any) -> None:
        """``for (i = min; i < min + extent; ++i)``."""
        scalar = scalar_of(stmt.loop_var)
        type_id, module = self.arithmetic.type_id(scalar), self.module
        first = self.scalar(stmt.min)
        end = self.arithmetic.binary("Add", scalar, first, self.scalar(stmt.extent))
        header, test, body, step, merge = (module.new_id() for _ in range(5))
        counter, following = module.new_id(), module.new_id()
        before = module.block
        module.do(Op.BRANCH, header)
        module.begin_block(header)
        module.emit_as(counter, Op.PHI, type_id, first, before, following, step)
        module.do(Op.LOOP_MERGE, merge, step, _UNROLL if int(stmt.kind) == _UNROLLED else 0)
        module.do(Op.BRANCH, test)
        module.begin_block(test)
        module.do(Op.BRANCH_CONDITIONAL, self.arithmetic.binary("LT", scalar, counter, end), body, merge)
        module.begin_block(body)
        self.expressions.variables[stmt.loop_var] = [counter]
        with module.branch():
            self._statement(stmt.body)
        module.do(Op.BRANCH, step)
        module.begin_block(step)
        one = self.scalar(stmt.step) if stmt.step is not None else self.arithmetic.constant(scalar, 1)
        module.emit_as(following, Op.I_ADD, type_id, counter, one)
        module.do(Op.BRANCH, header)
        module.begin_block(merge)

    def _While(self, stmt: Any) -> None:
        module = self.module
        header, test, body, step, merge = (module.new_id() for _ in range(5))
        module.do(Op.BRANCH, header)
        module.begin_block(header)
        module.do(Op.LOOP_MERGE, merge, step, 0)
        module.do(Op.BRANCH, test)
        module.begin_block(test)
        with module.branch():
            module.do(Op.BRANCH_CONDITIONAL, self.scalar(stmt.condition), body, merge)
            module.begin_block(body)
            self._statement(stmt.body)
        module.do(Op.BRANCH, step)
        module.begin_block(step)
        module.do(Op.BRANCH, header)
        module.begin_block(merge)

    def _IfThenElse(self, stmt: Any) -> None:
        module = self.module
        then, merge = module.new_id(), module.new_id()
        otherwise = module.new_id() if stmt.else_case is not None else merge
        condition = self.scalar(stmt.condition)
        module.do(Op.SELECTION_MERGE, merge, 0)
        module.do(Op.BRANCH_CONDITIONAL, condition, then, otherwise)
        for label, case in ((then, stmt.then_case), (otherwise, stmt.else_case)):
            if case is not None:
                module.begin_block(label)
                with module.branch():
                    self._statement(case)
                module.do(Op.BRANCH, merge)
        module.begin_block(merge)

    def _Evaluate(self, stmt: Any) -> None:
        call = stmt.value
        if name_of(call) == "IntImm":
            return
        if name_of(call) != "Call" or call.op.name != "tirx.tvm_storage_sync":
            raise CodegenError(f"statement {call} is not supported")
        if str(call.args[0].value) != "shared":
            raise CodegenError(f"a barrier of {call.args[0]} is not supported")
        scope = self.arithmetic.constant(UINT32, Scope.WORKGROUP)
        semantics = self.arithmetic.constant(UINT32, BARRIER_SEMANTICS)
        self.module.do(Op.CONTROL_BARRIER, scope, scope, semantics)

    def _AttrStmt(self, stmt: Any) -> None:
        if stmt.attr_key == "thread_extent":
            self._bind_thread(stmt.node, stmt.value)
        self._statement(stmt.body)

    def _bind_thread(self, axis: Any, extent: Any) -> None:
        """Give a thread axis its value: an element of a built-in variable."""
        tag = str(axis.thread_tag)
        number = _AXES.index(tag[-1])
        which = BuiltIn.WORKGROUP_ID
        if tag.startswith("threadIdx"):
            which = BuiltIn.LOCAL_INVOCATION_ID
            self.threads[number] = int(extent)
        if axis.var in self.expressions.variables:
            return
        module, uint = self.module, self.arithmetic.type_id(UINT32)
        if which not in self.builtins:
            vector = module.vector_type(uint, 3)
            self.builtins[which] = module.emit(Op.LOAD, vector, module.builtin(which))
        element = module.emit(Op.COMPOSITE_EXTRACT, uint, self.builtins[which], number)
        self.expressions.variables[axis.var] = [self.arithmetic.cast(UINT32, scalar_of(axis.var), element)]
