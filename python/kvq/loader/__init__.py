"""Checkpoints in (Hugging Face directories, GGUF files), and the format of converted weights."""

from kvq.loader.checkpoint import Checkpoint, open_checkpoint
from kvq.loader.tensor_cache import TensorCache, TensorCacheWriter

__all__ = ["Checkpoint", "TensorCache", "TensorCacheWriter", "open_checkpoint"]
