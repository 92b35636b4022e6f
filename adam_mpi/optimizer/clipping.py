"""Clipping of the gradient of a whole step, from the squared norms of its tensors. Pure."""

import math
from collections.abc import Sequence

import numpy as np
from numba import njit

from adam_mpi.config import Config


# The order of a sum may change, for vectors; it is the same each time.
@njit(nogil=True, cache=True, fastmath={"reassoc", "nsz"})
def squared_norm(values: np.ndarray) -> float:
    """Return the sum of the squares of `values`, added up in float64."""
    total = 0.0
    for i in range(values.size):
        value = np.float64(values[i])
        total += value * value
    return total


def clips_steps(config: Config) -> bool:
    """Return whether servers clip the gradients of the clocks of synchronous training."""
    optimizer = config.optimizer
    limited = 0 < optimizer.clip_norm < math.inf or 0 < optimizer.clip_tensor < math.inf
    return limited and config.consistency.staleness == 0


def clip_factors(squares: Sequence[float], clip_norm: float, clip_tensor: float) -> list[float]:
    """Return what the gradient of each tensor is multiplied by, from its squared norm; 0 is no limit.

    Each tensor is clipped to `clip_tensor` alone, then what this leaves of all of them together to `clip_norm`.
    """
    factors = [_factor(math.sqrt(square), clip_tensor) for square in squares]
    norm = math.sqrt(math.fsum(factor**2 * square for factor, square in zip(factors, squares, strict=True)))
    whole = _factor(norm, clip_norm)
    return [factor * whole for factor in factors]


def _factor(norm: float, limit: float) -> float:
    """Return what shortens a vector of this `norm` to the `limit`; 1 if it is no longer than that."""
    return limit / norm if 0 < limit < norm else 1.0
