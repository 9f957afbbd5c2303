"""Where a kernel's buffers live: storage buffers of the device, memory of the workgroup, of the thread."""

from __future__ import annotations

from .arithmetic import Arithmetic
from .scalar import BOOL, UINT32, Scalar
from .spirv import Capability, Decoration, Op, StorageClass


class Array:
    """Memory of a thread or workgroup: an array with a length.

    Attributes
    ----------
    scalar : Scalar
        What its elements are.
    """

    def __init__(self, arithmetic: Arithmetic, scalar: Scalar, length: int, storage: StorageClass) -> None:
        self._arithmetic, self.scalar, self._storage = arithmetic, scalar, storage
        arithmetic.computes(scalar)
        element = arithmetic.type_id(scalar)
        self._variable = arithmetic.module.variable(storage, arithmetic.module.array_type(element, length))

    def _pointer(self, index: int) -> int:
        module = self._arithmetic.module
        pointer = module.pointer_type(self._storage, self._arithmetic.type_id(self.scalar))
        return module.emit(Op.ACCESS_CHAIN, pointer, self._variable, index)

    def load(self, index: int) -> int:
        """The element at ``index``."""
        module = self._arithmetic.module
        return module.emit(Op.LOAD, self._arithmetic.type_id(self.scalar), self._pointer(index))

    def store(self, index: int, value: int) -> None:
        """Set the element at ``index``."""
        self._arithmetic.module.do(Op.STORE, self._pointer(index), value)


class StorageBuffer:
    """An argument of the kernel: a buffer of the device.

    A kernel may read one buffer as several types; each is a variable of its own at the same binding.

    Attributes
    ----------
    written : bool
        Whether the kernel stores to it; known when its body is done.
    """

    def __init__(self, arithmetic: Arithmetic, binding: int, restrict: bool) -> None:
        self._arithmetic, self._binding, self._restrict = arithmetic, binding, restrict
        self._variables: dict[Scalar, int] = {}
        self.written = False

    def view(self, scalar: Scalar) -> View:
        """The buffer as elements of a type."""
        return View(self._arithmetic, self, scalar)

    def pointer(self, scalar: Scalar, index: int) -> int:
        """Address of the element at ``index`` among those of a type."""
        module, arithmetic = self._arithmetic.module, self._arithmetic
        if scalar not in self._variables:
            if scalar.bits == 16:
                module.require(Capability.STORAGE_BUFFER_16BIT_ACCESS)
            elif scalar.bits == 8:
                module.require(Capability.STORAGE_BUFFER_8BIT_ACCESS)
            self._variables[scalar] = module.storage_buffer(
                arithmetic.type_id(scalar), scalar.size, self._binding
            )
        element = module.pointer_type(StorageClass.STORAGE_BUFFER, arithmetic.type_id(scalar))
        zero = arithmetic.constant(UINT32, 0)
        return module.emit(Op.ACCESS_CHAIN, element, self._variables[scalar], zero, index)

    def finish(self) -> None:
        """Say of the variables what is known when the body is done."""
        module = self._arithmetic.module
        for variable in self._variables.values():
            if len(self._variables) > 1:
                module.decorate(variable, Decoration.ALIASED)
            elif self._restrict:
                module.decorate(variable, Decoration.RESTRICT)
            if not self.written:
                module.decorate(variable, Decoration.NON_WRITABLE)


class View:
    """A storage buffer as elements of one type; bool is kept in bytes.

    Attributes
    ----------
    scalar : Scalar
        What loads give and stores take.
    """

    def __init__(self, arithmetic: Arithmetic, buffer: StorageBuffer, scalar: Scalar) -> None:
        self._arithmetic, self._buffer, self.scalar = arithmetic, buffer, scalar
        self._stored = Scalar("uint", 8) if scalar == BOOL else scalar

    def load(self, index: int) -> int:
        """The element at ``index``."""
        arithmetic = self._arithmetic
        pointer = self._buffer.pointer(self._stored, index)
        value = arithmetic.module.emit(Op.LOAD, arithmetic.type_id(self._stored), pointer)
        return arithmetic.cast(self._stored, self.scalar, value)

    def store(self, index: int, value: int) -> None:
        """Set the element at ``index``."""
        self._buffer.written = True
        arithmetic = self._arithmetic
        pointer = self._buffer.pointer(self._stored, index)
        arithmetic.module.do(Op.STORE, pointer, arithmetic.cast(self.scalar, self._stored, value))
