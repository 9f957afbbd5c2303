"""A small SPIR-V assembler: numbers of the specification, and a builder of modules."""

from .builder import ModuleBuilder
from .numbers import Capability, Decoration, Glsl, Op, StorageClass

__all__ = ["Capability", "Decoration", "Glsl", "ModuleBuilder", "Op", "StorageClass"]
