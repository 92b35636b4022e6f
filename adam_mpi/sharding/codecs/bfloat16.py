"""bfloat16: the upper half of a float32, rounded to nearest even: half the bytes, the full range, 8 bits a value."""

import numpy as np
from numba import njit


class Codec:
    """Sends two values in a word."""

    feedback = False

    def words(self, values: int) -> int:
        return (values + 1) // 2

    def encode(self, values: np.ndarray, residual: np.ndarray, out: np.ndarray) -> int:
        words = self.words(values.size)
        out[words - 1] = 0
        shorten(values.view(np.uint32), out[:words].view(np.uint16))
        return words

    def decode(self, words: np.ndarray, out: np.ndarray) -> None:
        lengthen(words.view(np.uint16), out.view(np.uint32))


@njit(nogil=True, cache=True)
def shorten(values: np.ndarray, out: np.ndarray) -> None:
    """Round the float32 bits `values` to the bits `out` of the codec bfloat16."""
    for i in range(values.size):
        word = values[i]
        # A NaN would round to an infinity: it is truncated instead.
        nan = (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        rounded = word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))
        out[i] = np.uint16((word if nan else rounded) >> np.uint32(16))


@njit(nogil=True, cache=True)
def lengthen(halves: np.ndarray, out: np.ndarray) -> None:
    """Convert the bits `halves` of the codec bfloat16 to the bits `out` of float32."""
    for i in range(out.size):
        out[i] = np.uint32(halves[i]) << np.uint32(16)
