"""The largest values only, with error feedback: values that are not sent are added to the next push.

body = indices (uint32) | values (float32)
"""

import numpy as np

SHARE = 1 / 64


class Codec:
    """Sends (index, value) of `SHARE` of the values."""

    feedback = True

    def words(self, values: int) -> int:
        return 2 * max(1, round(values * SHARE))

    def encode(self, values: np.ndarray, residual: np.ndarray, out: np.ndarray) -> int:
        words = self.words(values.size)
        count = words // 2
        residual += values
        indices = np.sort(np.argpartition(np.abs(residual), values.size - count)[-count:]).astype(np.uint32)
        out[:count] = indices
        out[count:words] = residual[indices].view(np.uint32)
        residual[indices] = 0
        return words

    def decode(self, words: np.ndarray, out: np.ndarray) -> None:
        count = words.size // 2
        out[:] = 0
        out[words[:count]] = words[count:].view(np.float32)
