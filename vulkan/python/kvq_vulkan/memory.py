"""Where a kernel's buffers live: storage buffers of the device, memory of the workgroup, of the thread."""

from __future__ import annotations

from .arithmetic import Arithmetic
from .scalar import BOOL, UINT32, Scalar
from .spirv import Capability, Decoration, Op, StorageClass


class Array:
    """Memory of a thread or workgroup: an array with a length, of scalars or of vectors.

    Attributes
    ----------
    scalar : Scalar
        What its elements are.
    run : int
        Elements of a vector; 1 for an array of scalars.
    """

    def __init__(
        self, arithmetic: Arithmetic, scalar: Scalar, length: int, storage: StorageClass, run: int = 1
    ) -> None:
        self._arithmetic, self.scalar, self._storage, self.run = arithmetic, scalar, storage, run
        arithmetic.computes(scalar)
        module, element = arithmetic.module, arithmetic.type_id(scalar)
        self._vector = module.vector_type(element, run) if run > 1 else element
        self._variable = module.variable(storage, module.array_type(self._vector, length // run))

    def _pointer(self, type_id: int, *place: int) -> int:
        module = self._arithmetic.module
        return module.emit(
            Op.ACCESS_CHAIN, module.pointer_type(self._storage, type_id), self._variable, *place
        )

    def load(self, *place: int) -> int:
        """The element at an index; in an array of vectors, of a vector and in it."""
        type_id = self._arithmetic.type_id(self.scalar)
        return self._arithmetic.module.emit(Op.LOAD, type_id, self._pointer(type_id, *place))

    def load_run(self, vector: int) -> list[int]:
        """The elements of a vector."""
        module, type_id = self._arithmetic.module, self._arithmetic.type_id(self.scalar)
        loaded = module.emit(Op.LOAD, self._vector, self._pointer(self._vector, vector))
        return [module.emit(Op.COMPOSITE_EXTRACT, type_id, loaded, lane) for lane in range(self.run)]

    def store(self, value: int, *place: int) -> None:
        """Set the element at an index, as :meth:`load` takes it."""
        type_id = self._arithmetic.type_id(self.scalar)
        self._arithmetic.module.do(Op.STORE, self._pointer(type_id, *place), value)


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

    run = 1

    def __init__(self, arithmetic: Arithmetic, buffer: StorageBuffer, scalar: Scalar) -> None:
        self._arithmetic, self._buffer, self.scalar = arithmetic, buffer, scalar
        self._stored = Scalar("uint", 8) if scalar == BOOL else scalar

    def load(self, index: int) -> int:
        """The element at ``index``."""
        arithmetic = self._arithmetic
        pointer = self._buffer.pointer(self._stored, index)
        value = arithmetic.module.emit(Op.LOAD, arithmetic.type_id(self._stored), pointer)
        return arithmetic.cast(self._stored, self.scalar, value)

    def store(self, value: int, index: int) -> None:
        """Set the element at ``index``."""
        self._buffer.written = True
        arithmetic = self._arithmetic
        pointer = self._buffer.pointer(self._stored, index)
        arithmetic.module.do(Op.STORE, pointer, arithmetic.cast(self.scalar, self._stored, value))
