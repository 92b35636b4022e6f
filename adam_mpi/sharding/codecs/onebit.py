"""One bit per value with error feedback (Seide et al., 2014).

In each group of values the positive ones are replaced by their mean, the others by theirs; the difference is added to
the next push. A group of 1024 values takes 34 words instead of 1024.
"""

import numpy as np
from numba import njit

GROUP = 1024
GROUP_WORDS = 2 + GROUP // 32


class Codec:
    """Sends two means and a bit per value of each group."""

    feedback = True

    def words(self, values: int) -> int:
        return 2 * -(-values // GROUP) + -(-values // 32)

    def encode(self, values: np.ndarray, residual: np.ndarray, out: np.ndarray) -> int:
        words = self.words(values.size)
        _encode(values, residual, out[:words], out[:words].view(np.float32))
        return words

    def decode(self, words: np.ndarray, out: np.ndarray) -> None:
        _decode(words, words.view(np.float32), out)


@njit(nogil=True, cache=True)
def _encode(values: np.ndarray, residual: np.ndarray, bits: np.ndarray, means: np.ndarray) -> None:
    """Encode `values` plus `residual` with one bit each; `bits` and `means` are the same memory in two types."""
    for group in range(-(-values.size // GROUP)):
        first = group * GROUP
        place = group * GROUP_WORDS
        last = min(first + GROUP, values.size)
        # In float64: the sum of a group may overflow a float32, its mean does not.
        above_sum = 0.0
        below_sum = 0.0
        positive = 0
        for i in range(first, last):
            residual[i] += values[i]
            if residual[i] > 0:
                above_sum += residual[i]
                positive += 1
            else:
                below_sum += residual[i]
        above = np.float32(above_sum / max(positive, 1))
        below = np.float32(below_sum / max(last - first - positive, 1))
        means[place] = above
        means[place + 1] = below
        bits[place + 2 : place + GROUP_WORDS] = 0
        for i in range(first, last):
            if residual[i] > 0:
                bits[place + 2 + (i - first) // 32] |= np.uint32(1) << np.uint32((i - first) % 32)
                residual[i] -= above
            else:
                residual[i] -= below


@njit(nogil=True, cache=True)
def _decode(bits: np.ndarray, means: np.ndarray, out: np.ndarray) -> None:
    """Decode `out.size` values of one bit each; `bits` and `means` are the same memory in two types."""
    for i in range(out.size):
        place = i // GROUP * GROUP_WORDS
        bit = i % GROUP
        one = (bits[place + 2 + bit // 32] >> np.uint32(bit % 32)) & np.uint32(1)
        out[i] = means[place] if one else means[place + 1]
