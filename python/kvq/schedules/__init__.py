"""Hand-written TIR kernels: ``cpu/`` for LLVM targets. Each file is one job and opens with its layout."""
