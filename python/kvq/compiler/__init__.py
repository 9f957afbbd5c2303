"""From a chat configuration to a compiled library: targets, compilation, linking."""

from .compile import compile_model

__all__ = ["compile_model"]
