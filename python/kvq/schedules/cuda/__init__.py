"""CUDA kernels in TIRx: one factory per kernel, each returning one PrimFunc."""
