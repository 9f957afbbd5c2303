"""The engine: requests in OpenAI's shapes over a loaded model."""

from kvq.engine.engine import Engine

__all__ = ["Engine"]
