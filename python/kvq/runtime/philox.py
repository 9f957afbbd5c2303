"""Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011): numbers from a counter.

The same key and counter give the same numbers on the host and in a kernel, in any order.
"""

from __future__ import annotations

#: Multipliers of the two halves of the counter, increments of the two words of the key, rounds.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

_WORD = 0xFFFFFFFF


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Four random words of 32 bits."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(ROUNDS):
        one, other = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = other >> 32 ^ c1 ^ k0, other & _WORD, one >> 32 ^ c3 ^ k1, one & _WORD
        k0, k1 = k0 + KEY_INCREMENTS[0] & _WORD, k1 + KEY_INCREMENTS[1] & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """A number of at least 0 and below 1, of 53 random bits, for a place in an answer."""
    high, low, _, _ = philox((seed & _WORD, seed >> 32 & _WORD), (position, choice, 0, 0))
    return ((high >> 5) * 2.0**26 + (low >> 6)) * 2.0**-53
