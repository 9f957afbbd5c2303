"""Text to token ids and back, and chat templates."""

from kvq.tokenizer.stream import StreamDecoder
from kvq.tokenizer.tokenizer import Tokenizer

__all__ = ["StreamDecoder", "Tokenizer"]
