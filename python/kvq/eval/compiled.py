"""A compiled model as the evaluation drives it: one sequence, all logits that are asked for."""

from __future__ import annotations

import numpy as np

from kvq.layout import KVLayout
from kvq.runtime.loaded_model import LoadedModel

_SEQUENCE = 0


class CompiledPrefiller:
    """One sequence of a loaded model; satisfies :class:`kvq.eval.perplexity.Prefiller`."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    @property
    def layout(self) -> KVLayout:
        """The layout of the model's cache."""
        return self._model.layout

    def reset(self) -> None:
        """Empty the sequence."""
        if _SEQUENCE in self._model.cache:
            self._model.cache.remove_sequence(_SEQUENCE)
        self._model.cache.add_sequence(_SEQUENCE)

    def prefill(self, ids: np.ndarray, logit_rows: np.ndarray) -> np.ndarray:
        """Append int32 ``ids`` ``[n]``; the logits float32 ``[m, vocab]`` of ``logit_rows`` ``[m]``."""
        return self._model.step([(_SEQUENCE, len(ids))], ids, logit_rows.tolist())
