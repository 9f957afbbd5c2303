"""The shape of a well-known model without its weights: a configuration, and libraries compiled for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvq.build import DEFAULT_ACTIVATIONS
from kvq.cache_dir import default_cache_dir
from kvq.config import CHAT_CONFIG_NAME, ChatConfig
from kvq.errors import ConfigError, LibraryError
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


def _library(directory: Path, name: str, quantization: str, scheme: str, activations: str) -> Path:
    weights, _ = resolve(quantization, None)
    asked = "" if activations == DEFAULT_ACTIVATIONS else f"-{activations}"
    return directory / f"{name}-{weights.name}-{scheme.replace('=', '').replace(':', '-')}{asked}.so"


def shape_libraries(
    directory: Path,
    name: str,
    quantization: str,
    schemes: Sequence[str],
    activations: str = DEFAULT_ACTIVATIONS,
) -> list[Path]:
    """The libraries that :func:`compile_shape` wrote, one a cache scheme.

    Raises
    ------
    LibraryError
        If one is missing.
    """
    paths = [_library(directory, name, quantization, scheme, activations) for scheme in schemes]
    for path in paths:
        if not path.is_file():
            raise LibraryError(f"{path}: no such library: write it with --compile-only")
    return paths


def compile_shape(
    directory: Path,
    name: str,
    quantization: str,
    schemes: Sequence[str],
    context_window_size: int,
    *,
    device: str,
    cuda_arch: str | None = None,
    opt: str = "O2",
    activations: str = DEFAULT_ACTIVATIONS,
    report: Callable[[str], None] | None = None,
) -> list[Path]:
    """Compile a library for each cache scheme, for a machine that cannot; no GPU is needed.

    Raises
    ------
    KvqError
        If the shape cannot be compiled.
    """
    from kvq.compiler import compile_model

    source = shape_directory(name, quantization, context_window_size)
    made = []
    for scheme in schemes:
        path = _library(directory, name, quantization, scheme, activations)
        if report is not None:
            report(f"compiling {path.name}")
        compile_model(
            source,
            path,
            device=device,
            opt=opt,
            activations=activations,
            cuda_arch=cuda_arch,
            overrides=f"kv_quantization={scheme}",
        )
        made.append(path)
    return made
