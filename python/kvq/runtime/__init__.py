"""What a machine needs to run a compiled library: the cache's book-keeping, step plans, loader, sampler.

Nothing here imports the compiler, and only ``library`` and ``loaded_model`` import TVM.
"""
