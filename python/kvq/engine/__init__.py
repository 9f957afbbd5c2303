"""The engine: many requests at once over a loaded model, in OpenAI's shapes."""

from kvq.engine.async_engine import AsyncEngine
from kvq.engine.engine import Engine, Generation
from kvq.engine.request import EngineStats, Piece, Request, RequestStats, TokenConstraint

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineStats",
    "Generation",
    "Piece",
    "Request",
    "RequestStats",
    "TokenConstraint",
]
