"""The apply kernel: folds what has arrived for a shard and takes one optimiser step, block by block."""

import numpy as np
from numba import njit

BLOCK = 4096  # parameters whose weights, velocity and sum stay in the first-level cache


@njit(nogil=True, cache=True, fastmath={"contract", "nsz"})
def momentum(
    weights: np.ndarray, velocity: np.ndarray, mail: np.ndarray, starts: np.ndarray,
    scale: float, rate: float, keep: float, decay: float,
) -> None:  # fmt: skip
    """velocity = keep * velocity + scale * (sum of gradients) + decay * weights;  weights -= rate * velocity.

    `mail` is the mailbox as float32; `starts` are the places of the gradients in it, folded in that order.
    """
    total = np.empty(BLOCK, weights.dtype)
    for first in range(0, weights.size, BLOCK):
        size = min(BLOCK, weights.size - first)
        for i in range(size):
            total[i] = mail[starts[0] + first + i]
        for k in range(1, starts.size):
            start = starts[k] + first
            for i in range(size):
                total[i] += mail[start + i]
        for i in range(size):
            step = keep * velocity[first + i] + scale * total[i] + decay * weights[first + i]
            velocity[first + i] = step
            weights[first + i] -= rate * step
