"""Values as they are."""

import numpy as np


class Codec:
    feedback = False

    def words(self, values: int) -> int:
        return values

    def encode(self, values: np.ndarray, residual: np.ndarray, out: np.ndarray) -> int:
        out[: values.size] = values.view(np.uint32)
        return values.size

    def decode(self, words: np.ndarray, out: np.ndarray) -> None:
        out[:] = words.view(np.float32)
