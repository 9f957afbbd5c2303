"""CPU kernels for LLVM targets: one factory per kernel, each returning one PrimFunc."""
