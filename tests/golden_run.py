"""Runs of a model over the tokens of a golden file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvq.runtime.loaded_model import LoadedModel

#: Largest difference of logits from those that transformers computed, with exact activations.
TOLERANCE = 1e-3


def run(model: LoadedModel, tokens: np.ndarray, chunks: Sequence[int]) -> np.ndarray:
    """Logits of every row, the tokens appended in steps of the given sizes, over and over."""
    model.cache.add_sequence("golden")
    logits = []
    start = index = 0
    while start < len(tokens):
        part = tokens[start : start + chunks[index % len(chunks)]]
        rows = None if len(part) == 1 else list(range(len(part)))  # one row goes through ``decode``
        logits.append(np.array(model.step([("golden", len(part))], part, rows)))
        start += len(part)
        index += 1
    model.cache.remove_sequence("golden")
    return np.concatenate(logits)
