"""The same weights under several cache schemes at once: what evaluation, benchmark and inspection compare.

Weights are converted once. They are loaded once, too, as long as the libraries want them in the same
layout, so that a comparison of five caches does not take five times the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import tvm_ffi

from kvq.build import Report, prepare_model
from kvq.errors import ConfigError
from kvq.quantization.scheme import KVQuantization
from kvq.runtime.cache_shape import CacheShape
from kvq.runtime.library import Library, Params
from kvq.runtime.loaded_model import LoadedModel
from kvq.runtime.random_params import random_params

__all__ = ["Comparison", "Report", "parse_schemes"]


def parse_schemes(text: str, *, reference: str | None = None) -> list[str]:
    """Read ``none,int4,k=int4:v=int3``; names are normalized and kept once, in the order given.

    Parameters
    ----------
    reference : str, optional
        A scheme that the comparison cannot do without; it is put first.

    Raises
    ------
    ConfigError
        If a name is unknown, or there is none.
    """
    names = [str(KVQuantization.parse(part.strip())) for part in text.split(",") if part.strip()]
    if not names:
        raise ConfigError("--kv names no cache scheme: use for example none,int4,int3")
    return list(dict.fromkeys(([reference] if reference else []) + names))


class Comparison:
    """One model, compiled for several cache schemes.

    Parameters
    ----------
    model : str
        As the command line takes it.
    quantization : str, optional
        Weight scheme; that of a converted directory by default.
    schemes : iterable of str
        Cache schemes, as :func:`parse_schemes` returns them; one that comes twice is loaded once.
    opt : str
        Optimization level of the libraries.
    report : callable, optional
        Called with what is being done.
    activations : str, optional
        As of :func:`~kvq.build.prepare_model`.
    device : str
        Device that the model runs on.
    random_weights : bool
        Whether weights are made up on the device.
    libraries : sequence of Path, optional
        Of the schemes, compiled elsewhere; without them ``model`` is built.

    Attributes
    ----------
    config_dir : Path
        Directory of the model's configuration and tokenizer.
    """

    def __init__(
        self,
        model: str,
        quantization: str | None,
        schemes: Iterable[str],
        opt: str,
        report: Report | None = None,
        *,
        activations: str | None = None,
        device: str = "cpu",
        random_weights: bool = False,
        libraries: Sequence[Path] | None = None,
    ) -> None:
        self.schemes = list(schemes)
        self._random_weights = random_weights
        self._libraries: list[Library] = []
        self._params: list[Params] = []
        for at, scheme in enumerate(self.schemes):
            first = self.schemes.index(scheme)
            if first < at:
                self._libraries.append(self._libraries[first])
                self._params.append(self._params[first])
                continue
            built = prepare_model(
                model,
                quantization,
                scheme,
                device=device,
                opt=opt,
                activations=activations,
                model_lib=libraries[at] if libraries else None,
                report=report,
            )
            self._libraries.append(Library.load(built.library, device))
            self._params.append(self._params_of(self._libraries[-1], built.weights_dir))
            self.config_dir = Path(built.config_dir)

    def _params_of(self, library: Library, weights_dir: Path) -> Params:
        for other, params in zip(self._libraries, self._params, strict=False):
            if other.metadata.params == library.metadata.params:
                return params
        return random_params(library) if self._random_weights else library.load_params(weights_dir)

    @property
    def threads(self) -> int:
        """Threads that the kernels run on."""
        return self._libraries[0].threads

    @property
    def context_window_size(self) -> int:
        """Tokens that the libraries were compiled for."""
        return min(library.metadata.context_window_size for library in self._libraries)

    @property
    def prefill_chunk_size(self) -> int:
        """Rows of a step that the libraries were compiled for."""
        return min(library.metadata.prefill_chunk_size for library in self._libraries)

    @staticmethod
    def release() -> None:
        """Give the device what models that are gone have left in TVM's pool."""
        tvm_ffi.get_global_func("vm.builtin.memory_manager.clear")()

    def load(
        self,
        num_tokens: int,
        chunk: int,
        sequences: int = 1,
        extra_tokens: int = 0,
        whole_sequences: int = 1,
    ) -> list[LoadedModel]:
        """A model a scheme, with a cache of its own.

        Parameters
        ----------
        num_tokens : int
            Tokens of the longest sequence.
        chunk : int
            Rows of the largest step.
        sequences : int
            Sequences at once.
        extra_tokens : int
            Tokens that each further sequence holds beside what it shares with another.
        whole_sequences : int
            Sequences that share nothing.

        Raises
        ------
        ConfigError
            If the libraries were compiled for less.
        """
        if num_tokens > self.context_window_size:
            raise ConfigError(
                f"{num_tokens} tokens exceed the context window of {self.context_window_size} that the "
                "model was compiled for: ask for less"
            )
        if not 1 <= chunk <= self.prefill_chunk_size:
            raise ConfigError(
                f"--chunk {chunk} is outside 1 .. {self.prefill_chunk_size}, the compiled chunk"
            )
        models = []
        for library, params in zip(self._libraries, self._params, strict=True):
            layout = library.metadata.layout
            pages = whole_sequences * layout.pages_for(num_tokens)
            pages += (sequences - whole_sequences) * (layout.pages_for(extra_tokens) + 1)
            shape = CacheShape.for_limits(
                layout,
                context_window_size=num_tokens,
                max_batch_size=sequences,
                prefill_chunk_size=chunk,
                num_pages=pages,
            )
            models.append(LoadedModel(library, params, shape, chunk))
        return models
