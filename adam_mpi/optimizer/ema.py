"""The exponential moving average of the weights. Pure."""

import numpy as np
from numba import njit

from adam_mpi.config import Optimizer


def ema_weight(optimizer: Optimizer, ended: float) -> np.float32:
    """Return the share of the new weights in their running average after `ended` batches."""
    return np.float32(1 - (1 - optimizer.ema) ** ended)


@njit(nogil=True, cache=True)
def update_ema(mean: np.ndarray, weights: np.ndarray, share: float) -> None:
    """Compute mean += share * (weights - mean), a running average of the weights."""
    for i in range(mean.size):
        mean[i] += share * (weights[i] - mean[i])
