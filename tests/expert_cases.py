"""Cases of mixtures of experts, and what numpy makes of them."""

from __future__ import annotations

import numpy as np

ROWS = 70
NUM, TOP = 5, 2


def chosen_experts(rng: np.random.Generator) -> np.ndarray:
    """Two different experts for each row; expert 3 is never chosen."""
    used = [0, 1, 2, 4]
    return np.stack([rng.permutation(used)[:TOP] for _ in range(ROWS)]).astype(np.int32)


def routing_logits(num: int) -> np.ndarray:
    """Logits ``[ROWS, num]``; a row of equal ones, and one where all but the first underflow."""
    logits = (4 * np.random.default_rng(0).standard_normal((ROWS, num))).astype(np.float32)
    logits[3] = 1.5
    logits[4, 1:] = -200
    return logits


def expected_routing(logits: np.ndarray, top: int, normalize: bool) -> tuple[np.ndarray, np.ndarray]:
    """Weights in float64 and ids of each row's ``top`` likeliest experts; of equal ones the first."""
    order = np.argsort(-logits, axis=1, kind="stable")[:, :top]
    likelihood = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    weights = np.take_along_axis(likelihood, order, axis=1)
    return weights / (weights if normalize else likelihood).sum(axis=1, keepdims=True), order
