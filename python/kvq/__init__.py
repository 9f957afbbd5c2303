"""kvq: open LLM checkpoints compiled into small libraries with a 4-bit or 3-bit paged KV cache.

Importing the package is light: neither the compiler nor the runtime is loaded until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["AsyncEngine", "Engine", "__version__"]

if TYPE_CHECKING:
    from kvq.engine import AsyncEngine, Engine


def __getattr__(name: str) -> Any:
    if name in ("AsyncEngine", "Engine"):
        import kvq.engine

        return getattr(kvq.engine, name)
    raise AttributeError(f"module 'kvq' has no attribute {name!r}")
