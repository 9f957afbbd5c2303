"""Builds one SPIR-V module of one compute kernel: ids, types and constants once each, sections in order."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from .numbers import (
    MAGIC,
    VERSION,
    BuiltIn,
    Capability,
    Decoration,
    ExecutionMode,
    Glsl,
    Op,
    StorageClass,
)

#: Instructions whose result depends on more than their operands.
_IMPURE = {
    Op.LOAD,
    Op.PHI,
    Op.GROUP_NON_UNIFORM_SHUFFLE,
    Op.GROUP_NON_UNIFORM_SHUFFLE_XOR,
    Op.GROUP_NON_UNIFORM_SHUFFLE_UP,
    Op.GROUP_NON_UNIFORM_SHUFFLE_DOWN,
}
_LOGICAL_ADDRESSING, _GLSL450_MEMORY = 0, 1
_GL_COMPUTE = 5


def _words_of(text: str) -> list[int]:
    """A string literal: UTF-8, closed by a zero, padded to words."""
    data = text.encode() + b"\0"
    data += b"\0" * (-len(data) % 4)
    return list(struct.unpack(f"<{len(data) // 4}I", data))


class ModuleBuilder:
    """A module in the making.

    Instructions of the kernel's body go to :meth:`emit` (with a result) and :meth:`do` (without); its
    variables to :meth:`variable`.

    Attributes
    ----------
    block : int
        Label of the basic block that instructions go to.
    """

    def __init__(self) -> None:
        self._next_id = 1
        self._capabilities = {Capability.SHADER}
        self._modes: list[tuple[ExecutionMode, int]] = []
        self._decorations: list[int] = []
        self._globals: list[int] = []
        self._locals: list[int] = []
        self._body: list[int] = []
        self._known: dict[tuple[int, ...], int] = {}
        self._computed: dict[tuple[int, ...], int] = {}
        self._interface: list[int] = []
        self._glsl = self.new_id()
        self._entry = self.block = self.new_id()

    def new_id(self) -> int:
        """An id that nothing has yet."""
        self._next_id += 1
        return self._next_id - 1

    def require(self, capability: Capability) -> None:
        """Declare that the kernel needs ``capability``."""
        self._capabilities.add(capability)

    def requires(self, capability: Capability) -> bool:
        """Whether the kernel needs ``capability``, as far as it is written."""
        return capability in self._capabilities

    def require_mode(self, mode: ExecutionMode, bits: int, capability: Capability) -> None:
        """Ask for a way of computing with floats of ``bits``, and the capability that goes with it."""
        self.require(capability)
        if (mode, bits) not in self._modes:
            self._modes.append((mode, bits))

    # Types and constants: an instruction that was said before keeps its id.

    def _shared(self, op: Op, *operands: int) -> int:
        key = (op, *operands)
        if key not in self._known:
            self._known[key] = self.new_id()
            _append(self._globals, op, self._known[key], *operands)
        return self._known[key]

    def void_type(self) -> int:
        return self._shared(Op.TYPE_VOID)

    def bool_type(self) -> int:
        return self._shared(Op.TYPE_BOOL)

    def int_type(self, bits: int, signed: bool) -> int:
        return self._shared(Op.TYPE_INT, bits, int(signed))

    def float_type(self, bits: int) -> int:
        return self._shared(Op.TYPE_FLOAT, bits)

    def vector_type(self, element: int, lanes: int) -> int:
        return self._shared(Op.TYPE_VECTOR, element, lanes)

    def array_type(self, element: int, length: int) -> int:
        return self._shared(Op.TYPE_ARRAY, element, self.constant(self.int_type(32, False), length))

    def pointer_type(self, storage: StorageClass, pointee: int) -> int:
        return self._shared(Op.TYPE_POINTER, storage, pointee)

    def constant(self, type_id: int, *words: int) -> int:
        """A constant by its bits, least significant word first."""
        key = (Op.CONSTANT, type_id, *words)
        if key not in self._known:
            self._known[key] = self.new_id()
            _append(self._globals, Op.CONSTANT, type_id, self._known[key], *words)
        return self._known[key]

    def bool_constant(self, value: bool) -> int:
        op = Op.CONSTANT_TRUE if value else Op.CONSTANT_FALSE
        key = (op,)
        if key not in self._known:
            self._known[key] = self.new_id()
            _append(self._globals, op, self.bool_type(), self._known[key])
        return self._known[key]

    # Variables

    def decorate(self, target: int, decoration: Decoration, *operands: int) -> None:
        _append(self._decorations, Op.DECORATE, target, decoration, *operands)

    def _block(self, members: Iterable[tuple[int, int]]) -> int:
        """A struct with explicit offsets: (type, offset) of its members."""
        members = list(members)
        block = self.new_id()
        _append(self._globals, Op.TYPE_STRUCT, block, *(member for member, _ in members))
        self.decorate(block, Decoration.BLOCK)
        for index, (_, offset) in enumerate(members):
            _append(self._decorations, Op.MEMBER_DECORATE, block, index, Decoration.OFFSET, offset)
        return block

    def variable(self, storage: StorageClass, pointee: int) -> int:
        """A variable; those of the function go where SPIR-V wants them, at its beginning."""
        variable = self.new_id()
        section = self._locals if storage == StorageClass.FUNCTION else self._globals
        pointer = self.pointer_type(storage, pointee)
        _append(section, Op.VARIABLE, pointer, variable, storage)
        if storage != StorageClass.FUNCTION:
            self._interface.append(variable)
        return variable

    def storage_buffer(self, element: int, stride: int, binding: int) -> int:
        """A variable of the storage buffer at ``binding``: a struct of one array of ``element``."""
        array = self.new_id()
        _append(self._globals, Op.TYPE_RUNTIME_ARRAY, array, element)
        self.decorate(array, Decoration.ARRAY_STRIDE, stride)
        variable = self.variable(StorageClass.STORAGE_BUFFER, self._block([(array, 0)]))
        self.decorate(variable, Decoration.DESCRIPTOR_SET, 0)
        self.decorate(variable, Decoration.BINDING, binding)
        return variable

    def push_constants(self, members: Iterable[int]) -> int:
        """A variable of the push constants: members of 4 bytes each."""
        block = self._block((member, 4 * index) for index, member in enumerate(members))
        return self.variable(StorageClass.PUSH_CONSTANT, block)

    def builtin(self, which: BuiltIn) -> int:
        """A variable of three uint32 that the device fills."""
        variable = self.variable(StorageClass.INPUT, self.vector_type(self.int_type(32, False), 3))
        self.decorate(variable, Decoration.BUILT_IN, which)
        return variable

    # The body

    def emit(self, op: Op, type_id: int, *operands: int) -> int:
        """Append an instruction that has a result; its id. No branch computes the same value twice."""
        key = (op, type_id, *operands)
        if op not in _IMPURE and key in self._computed:
            return self._computed[key]
        result = self._computed[key] = self.new_id()
        _append(self._body, op, type_id, result, *operands)
        return result

    def emit_as(self, result: int, op: Op, type_id: int, *operands: int) -> None:
        """Append an instruction whose result was named before."""
        _append(self._body, op, type_id, result, *operands)

    def do(self, op: Op, *operands: int) -> None:
        """Append an instruction without a result."""
        _append(self._body, op, *operands)

    @contextmanager
    def branch(self) -> Iterator[None]:
        """Blocks that may not run, or often: what they compute is not known behind them.

        Nor do they use what was computed before: values that live across loops cost more registers than it
        takes to compute them again, and drivers move out of a loop what they see fit.
        """
        kept, self._computed = self._computed, {}
        yield
        self._computed = kept

    def begin_block(self, label: int) -> None:
        """Start the basic block ``label``; the one before must have ended."""
        self.do(Op.LABEL, label)
        self.block = label

    def glsl(self, instruction: Glsl, type_id: int, *operands: int) -> int:
        """Append an instruction of GLSL.std.450; its result."""
        return self.emit(Op.EXT_INST, type_id, self._glsl, instruction, *operands)

    def finish(self, name: str, local_size: tuple[int, int, int]) -> bytes:
        """The module: entry point ``name``, workgroups of ``local_size``."""
        void = self.void_type()
        function_type = self._shared(Op.TYPE_FUNCTION, void)
        main = self.new_id()
        head: list[int] = []
        for capability in sorted(self._capabilities):
            _append(head, Op.CAPABILITY, capability)
        _append(head, Op.EXT_INST_IMPORT, self._glsl, *_words_of("GLSL.std.450"))
        _append(head, Op.MEMORY_MODEL, _LOGICAL_ADDRESSING, _GLSL450_MEMORY)
        _append(head, Op.ENTRY_POINT, _GL_COMPUTE, main, *_words_of(name), *self._interface)
        _append(head, Op.EXECUTION_MODE, main, ExecutionMode.LOCAL_SIZE, *local_size)
        for mode, bits in self._modes:
            _append(head, Op.EXECUTION_MODE, main, mode, bits)
        function: list[int] = []
        _append(function, Op.FUNCTION, void, main, 0, function_type)
        _append(function, Op.LABEL, self._entry)
        tail: list[int] = []
        _append(tail, Op.RETURN)
        _append(tail, Op.FUNCTION_END)
        words = [MAGIC, VERSION, 0, self._next_id, 0, *head, *self._decorations, *self._globals]
        words += [*function, *self._locals, *self._body, *tail]
        return struct.pack(f"<{len(words)}I", *words)


def _append(section: list[int], op: Op, *operands: int) -> None:
    section.append((len(operands) + 1) << 16 | op)
    section.extend(operands)
