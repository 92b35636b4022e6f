"""Steps of single parameters, named by their indices; all others, and their state, stay as they are."""

import numpy as np
from numba import njit

from adam_mpi.optimizer.kernels import BLOCK
from adam_mpi.optimizer.rule_kernels import ADDITIVE, DESCENT, take_step


@njit(nogil=True, cache=True)
def step_at(
    rule: int, weights: np.ndarray, states: np.ndarray, indices: np.ndarray, values: np.ndarray, rows: np.ndarray
) -> None:
    """Take the steps with the coefficients `rows` of the parameters at `indices`; `values` are their gradients.

    Rules with a state need each index at most once.
    """
    if rule == ADDITIVE or rule == DESCENT:
        _add_at(weights, indices, values, rows[0, 0], -rows[0, 1] if rule == DESCENT else np.float32(1))
        return
    block = np.empty(BLOCK, np.float32)
    past = np.empty((states.shape[0], BLOCK), np.float32)
    for first in range(0, indices.size, BLOCK):
        size = min(BLOCK, indices.size - first)
        chosen = indices[first : first + size]
        for i in range(size):
            block[i] = weights[chosen[i]]
            for state in range(states.shape[0]):
                past[state, i] = states[state, chosen[i]]
        for k in range(rows.shape[0]):
            source = values[first : first + size]
            take_step(rule, block[:size], past.ctypes.data, 4 * BLOCK, source, np.float32(1), rows[k])
        for i in range(size):
            weights[chosen[i]] = block[i]
            for state in range(states.shape[0]):
                states[state, chosen[i]] = past[state, i]


@njit(nogil=True, cache=True)
def _add_at(weights, indices, values, shrink, factor):  # type: ignore[no-untyped-def]
    """Add `factor` times each value to the weight at its index, of which `shrink` is subtracted."""
    for k in range(indices.size):
        weight = weights[indices[k]]
        weights[indices[k]] = (weight - shrink * weight) + factor * values[k]
