"""Random numbers without state: number `n` of a key is the same in whatever order numbers are drawn."""

import numba
import numpy as np


@numba.njit(nogil=True, cache=True)
def mix(word: np.uint64) -> np.uint64:
    """Return the 64-bit `word` of the counter-based random numbers with its bits scrambled by a bijection."""
    word = (word ^ (word >> np.uint64(31))) * np.uint64(0xD6A3_5C7B_91E8_4F2D)
    word = (word ^ (word >> np.uint64(29))) * np.uint64(0xA8F1_627D_3B95_C4E3)
    return word ^ (word >> np.uint64(32))


@numba.njit(nogil=True, cache=True)
def key_of(seed: np.uint64, number: int) -> np.uint64:
    """Return the random key that `seed` gives to `number`, for the counter-based random numbers."""
    return mix(mix(seed) + np.uint64(number))


@numba.njit(nogil=True, cache=True)
def uniform(key: np.uint64, number: int, low: float, high: float) -> float:
    """Return the counter-based random number `number` of `key`, uniform in [low, high)."""
    bits = mix(key + np.uint64(number) * np.uint64(0x9E37_79B9_7F4A_7C15))
    return low + (high - low) * (float(bits >> np.uint64(11)) / 2.0**53)
