"""The apply kernels: sum the gradients that have arrived for a run of parameters and take one optimizer step.

Kernels work block by block, so that each block of weights and state is read and written once per batch, while it is in
a near cache. `memory` holds the gradients as float32 (it is the mailbox, or a buffer); `starts` are their offsets in
it. They are added in that order, each times its element of `scales`.
"""

import numpy as np
from numba import njit

from adam_mpi.base.native import floats, prefetch

PAGE = 1024  # float32 in a page of memory
BLOCK = 4 * PAGE
# additive: weights += sum, because workers that step themselves push the change of their weights.
# descent: weights -= rate * (sum + decay * weights), which is momentum without a velocity.
# The other rules keep a state. All take their factors from `optimizer_rules.Coefficients`.
RULES = ("additive", "descent", "momentum", "nesterov", "adagrad")
ADDITIVE, DESCENT, MOMENTUM, NESTEROV, ADAGRAD = range(len(RULES))


@njit(nogil=True, cache=True, inline="always")
def _four(memory, starts, first, size):  # type: ignore[no-untyped-def]
    """Return `size` values from `first` of each of four messages."""
    a = memory[starts[0] + first :][:size]
    b = memory[starts[1] + first :][:size]
    return a, b, memory[starts[2] + first :][:size], memory[starts[3] + first :][:size]


@njit(nogil=True, cache=True, inline="always")
def _four_scales(scales):  # type: ignore[no-untyped-def]
    """Return the first four scales."""
    return scales[0], scales[1], scales[2], scales[3]


@njit(nogil=True, cache=True, inline="always")
def _fold(total, memory, starts, scales, first, size):  # type: ignore[no-untyped-def]
    """Add a block of each message, eight or four at a time: several streams keep the memory busier than one."""
    eights = starts.size - starts.size % 8
    fours = starts.size - starts.size % 4
    for k in range(0, eights, 8):
        a, b, c, d = _four(memory, starts[k:], first, size)
        e, f, g, h = _four(memory, starts[k + 4 :], first, size)
        p, q, r, s = _four_scales(scales[k:])
        t, u, v, w = _four_scales(scales[k + 4 :])
        for i in range(size):
            half = (p * a[i] + q * b[i]) + (r * c[i] + s * d[i])
            total[i] += half + ((t * e[i] + u * f[i]) + (v * g[i] + w * h[i]))
    for k in range(eights, fours, 4):
        a, b, c, d = _four(memory, starts[k:], first, size)
        p, q, r, s = _four_scales(scales[k:])
        for i in range(size):
            total[i] += (p * a[i] + q * b[i]) + (r * c[i] + s * d[i])
    for k in range(fours, starts.size):
        source = memory[starts[k] + first :][:size]
        scale = scales[k]
        for i in range(size):
            total[i] += scale * source[i]


@njit(nogil=True, cache=True)
def fold(total: np.ndarray, memory: np.ndarray, starts: np.ndarray, scales: np.ndarray) -> None:
    """Write the scaled sum of the messages into `total`."""
    for first in range(0, total.size, BLOCK):
        size = min(BLOCK, total.size - first)
        total[first : first + size] = 0
        _fold(total[first : first + size], memory, starts, scales, first, size)


@njit(nogil=True, cache=True)
def step(
    rule: int,
    weights: np.ndarray,
    state: np.ndarray,
    memory: np.ndarray,
    starts: np.ndarray,
    scales: np.ndarray,
    coefficients: np.ndarray,
) -> None:
    """Take one step of `rule`; additive and descent do not touch `state`, and fold straight into `weights`."""
    shrink = coefficients[0]
    gain = coefficients[1]
    carry = coefficients[2]
    keep = coefficients[3]
    take = coefficients[4]
    pull = coefficients[5]
    total = np.empty(BLOCK, weights.dtype)
    steps = -gain * scales if rule == DESCENT else scales
    for first in range(0, weights.size, BLOCK):
        size = min(BLOCK, weights.size - first)
        block = weights[first : first + size]
        past = state[first : first + size]
        _fetch_ahead(weights, first + BLOCK)
        if rule == ADDITIVE or rule == DESCENT:
            if rule == DESCENT and shrink != 0:
                shrink_weights(block, shrink)
            _fold(block, memory, starts, steps, first, size)
            continue
        # Not above: fetching pages of a state that no step has touched yet takes time.
        _fetch_ahead(state, first + BLOCK)
        total[:size] = 0
        _fold(total, memory, starts, scales, first, size)
        if rule == ADAGRAD:
            _adagrad(block, past, total, gain, take, pull)
        else:
            _velocity(block, past, total, shrink, gain, carry, keep, take, pull)


@njit(nogil=True, cache=True)
def steps(
    rule: int,
    places: np.ndarray,
    memory: np.ndarray,
    ends: np.ndarray,
    starts: np.ndarray,
    scales: np.ndarray,
    coefficients: np.ndarray,
) -> None:
    """Take a step of each of several shards; shard `k` takes the messages from `ends[k - 1]` to `ends[k]`.

    A row of `places` is: address of the weights, address of the state, size. `coefficients` has a row for each shard.
    """
    first = 0
    for k in range(ends.size):
        weights = floats(places[k, 0], places[k, 2])
        state = floats(places[k, 1], places[k, 2])
        step(rule, weights, state, memory, starts[first : ends[k]], scales[first : ends[k]], coefficients[k])
        first = ends[k]


@njit(nogil=True, cache=True, inline="always")
def _fetch_ahead(values, first):  # type: ignore[no-untyped-def]
    """Prefetch the start of each page of the block that begins at `first`."""
    for page in range(first, first + BLOCK, PAGE):
        prefetch(values, page)


@njit(nogil=True, cache=True)
def shrink_weights(block, share):  # type: ignore[no-untyped-def]
    """Subtract `share` of each weight from it."""
    for i in range(block.size):
        block[i] -= share * block[i]


@njit(nogil=True, cache=True)
def _velocity(block, velocities, total, shrink, gain, carry, keep, take, pull):  # type: ignore[no-untyped-def]
    """Step a rule with a velocity; see `optimizer_rules.Coefficients`."""
    for i in range(block.size):
        weight = block[i]
        velocity = velocities[i]
        velocities[i] = keep * velocity + (take * total[i] + pull * weight)
        block[i] = weight - (carry * velocity + (gain * total[i] + shrink * weight))


@njit(nogil=True, cache=True)
def _adagrad(block, squares, total, rate, take, pull):  # type: ignore[no-untyped-def]
    """Compute squares += take * gradient^2;  weights -= rate * gradient / (sqrt(squares) + 1e-8)."""
    for i in range(block.size):
        gradient = total[i] + pull * block[i]
        squares[i] += take * (gradient * gradient)
        block[i] -= rate * gradient / (np.sqrt(squares[i]) + np.float32(1e-8))


@njit(nogil=True, cache=True)
def add(total: np.ndarray, values: np.ndarray, scale: float) -> None:
    """Add `scale` times `values` to `total`."""
    for i in range(total.size):
        total[i] += scale * values[i]


@njit(nogil=True, cache=True)
def update_ema(mean: np.ndarray, weights: np.ndarray, share: float) -> None:
    """Compute mean += share * (weights - mean), a running average of the weights."""
    for i in range(mean.size):
        mean[i] += share * (weights[i] - mean[i])


@njit(nogil=True, cache=True)
def sparse_additive(
    weights: np.ndarray, state: np.ndarray, indices: np.ndarray, values: np.ndarray, rate: float
) -> None:
    """Add each value to the weight at its index."""
    for k in range(indices.size):
        weights[indices[k]] += values[k]


@njit(nogil=True, cache=True)
def sparse_descent(
    weights: np.ndarray, state: np.ndarray, indices: np.ndarray, values: np.ndarray, rate: float
) -> None:
    """Subtract `rate` times each value from the weight at its index."""
    for k in range(indices.size):
        weights[indices[k]] -= rate * values[k]


@njit(nogil=True, cache=True)
def sparse_adagrad(
    weights: np.ndarray, state: np.ndarray, indices: np.ndarray, values: np.ndarray, rate: float
) -> None:
    """Take a step of AdaGrad at each index."""
    for k in range(indices.size):
        i = indices[k]
        state[i] += values[k] * values[k]
        weights[i] -= rate * values[k] / (np.sqrt(state[i]) + np.float32(1e-8))


SPARSE_KERNELS = {"additive": sparse_additive, "descent": sparse_descent, "adagrad": sparse_adagrad}
