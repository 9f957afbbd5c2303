"""The shape of a well-known model without its weights: a configuration that can be compiled."""

from __future__ import annotations

from pathlib import Path

from kvq.cache_dir import default_cache_dir
from kvq.config import CHAT_CONFIG_NAME, ChatConfig
from kvq.errors import ConfigError
from kvq.presets import PRESETS
from kvq.quantization.scheme import resolve

#: Tokens, rows of a step and sequences that such a library is compiled for, if the context is no longer.
_PREFILL_CHUNK, _BATCH = 2048, 128


def shape_directory(name: str, quantization: str, context_window_size: int) -> Path:
    """A directory that stands in for a converted one, in kvq's cache directory; it has no weights.

    Parameters
    ----------
    name : str
        One of :data:`kvq.presets.PRESETS`.
    quantization : str
        Weight scheme.
    context_window_size : int
        Tokens that the library must allow, at least.

    Raises
    ------
    ConfigError
        If the name or the scheme is unknown.
    """
    if name not in PRESETS:
        raise ConfigError(f"--random-weights: {name!r} is no known shape: use one of {', '.join(PRESETS)}")
    weights, _ = resolve(quantization, None)
    model = PRESETS[name]
    context = max(context_window_size, model.max_position_embeddings)
    config = ChatConfig(
        model_type=model.model_type,
        quantization=weights.name,
        model_config=model.model_copy(update={"max_position_embeddings": context}),
        vocab_size=model.vocab_size,
        active_vocab_size=model.vocab_size,
        context_window_size=context,
        prefill_chunk_size=min(_PREFILL_CHUNK, context),
        max_batch_size=_BATCH,
        conv_template="raw",
    )
    directory = default_cache_dir() / "shapes" / f"{name}-{weights.name}-{context}"
    directory.mkdir(parents=True, exist_ok=True)
    config.save(directory / CHAT_CONFIG_NAME)
    return directory
