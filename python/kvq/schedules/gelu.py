"""Numbers of gelu's approximation by tanh, ``x * sigmoid(GELU_SCALE * x * (1 + GELU_CUBIC * x**2))``."""

from __future__ import annotations

from math import pi, sqrt

#: ``1 + tanh(u) = 2 * sigmoid(2 * u)``: the scale of ``u``, doubled (arXiv:1606.08415).
GELU_SCALE = 2 * sqrt(2 / pi)
GELU_CUBIC = 0.044715
