"""Plain steps on flat vectors, each one pass over memory."""

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def descend(weights: np.ndarray, gradient: np.ndarray, factor: float) -> None:
    """A step down the gradient, which is left as it is."""
    for i in range(gradient.size):
        weights[i] -= factor * gradient[i]
