"""Plain steps on flat vectors, each one pass over memory."""

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def descend(weights: np.ndarray, gradient: np.ndarray, factor: float) -> None:
    """A step down the gradient, which is left as it is."""
    for i in range(gradient.size):
        weights[i] -= factor * gradient[i]


@njit(nogil=True, cache=True)
def share(shared: np.ndarray, local: np.ndarray, seen: np.ndarray) -> None:
    """Add what a thread changed since it last looked to the weights of all threads, and take over what they have."""
    for i in range(local.size):
        shared[i] += local[i] - seen[i]
        seen[i] = shared[i]
        local[i] = seen[i]
