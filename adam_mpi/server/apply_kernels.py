"""The apply kernels: fold what has arrived for a run of parameters and take one optimizer step, block by block.

Each block of weights and state is read and written once per batch, while it is in a near cache. `mail` is
memory with the gradients as float32; `starts` are their places in it, folded in that order, each times its scale.
"""

import numpy as np
from numba import njit

from adam_mpi.base.native import floats, prefetch

PAGE = 1024  # float32 in a page of memory
BLOCK = 4 * PAGE
# weights += sum: what Adam's own workers push is the change of their weights; or weights -= rate * (sum + decay *
# weights), which is momentum without any; the others keep a state. All take their factors from `rules.Numbers`.
RULES = ("additive", "descent", "momentum", "nesterov", "adagrad")
ADDITIVE, DESCENT, MOMENTUM, NESTEROV, ADAGRAD = range(len(RULES))


@njit(nogil=True, cache=True, inline="always")
def _four(mail, starts, first, size):  # type: ignore[no-untyped-def]
    """A block of each of four messages."""
    a, b = mail[starts[0] + first :][:size], mail[starts[1] + first :][:size]
    return a, b, mail[starts[2] + first :][:size], mail[starts[3] + first :][:size]


@njit(nogil=True, cache=True, inline="always")
def _fold(total, mail, starts, scales, first, size):  # type: ignore[no-untyped-def]
    """Add a block of each message, eight or four at a time: several streams keep the memory busier than one."""
    eights, fours = starts.size - starts.size % 8, starts.size - starts.size % 4
    for k in range(0, eights, 8):
        a, b, c, d = _four(mail, starts[k:], first, size)
        e, f, g, h = _four(mail, starts[k + 4 :], first, size)
        p, q, r, s = scales[k], scales[k + 1], scales[k + 2], scales[k + 3]
        t, u, v, w = scales[k + 4], scales[k + 5], scales[k + 6], scales[k + 7]
        for i in range(size):
            half = (p * a[i] + q * b[i]) + (r * c[i] + s * d[i])
            total[i] += half + ((t * e[i] + u * f[i]) + (v * g[i] + w * h[i]))
    for k in range(eights, fours, 4):
        a, b, c, d = _four(mail, starts[k:], first, size)
        p, q, r, s = scales[k], scales[k + 1], scales[k + 2], scales[k + 3]
        for i in range(size):
            total[i] += (p * a[i] + q * b[i]) + (r * c[i] + s * d[i])
    for k in range(fours, starts.size):
        source, scale = mail[starts[k] + first :][:size], scales[k]
        for i in range(size):
            total[i] += scale * source[i]


@njit(nogil=True, cache=True)
def fold(total: np.ndarray, mail: np.ndarray, starts: np.ndarray, scales: np.ndarray) -> None:
    """What the messages come to together."""
    for first in range(0, total.size, BLOCK):
        size = min(BLOCK, total.size - first)
        total[first : first + size] = 0
        _fold(total[first : first + size], mail, starts, scales, first, size)


@njit(nogil=True, cache=True)
def step(
    rule: int,
    weights: np.ndarray,
    state: np.ndarray,
    mail: np.ndarray,
    starts: np.ndarray,
    scales: np.ndarray,
    numbers: np.ndarray,
) -> None:
    """One step of a rule; additive and descent leave the state alone, and fold straight into the weights."""
    shrink, gain, carry = numbers[0], numbers[1], numbers[2]
    keep, take, pull = numbers[3], numbers[4], numbers[5]
    total, steps = np.empty(BLOCK, weights.dtype), -gain * scales if rule == DESCENT else scales
    for first in range(0, weights.size, BLOCK):
        size = min(BLOCK, weights.size - first)
        block, past = weights[first : first + size], state[first : first + size]
        _fetch_ahead(weights, first + BLOCK)
        if rule == ADDITIVE or rule == DESCENT:
            if rule == DESCENT and shrink != 0:
                lessen(block, shrink)
            _fold(block, mail, starts, steps, first, size)
            continue
        # Not above: to look for pages that no step has touched yet takes time.
        _fetch_ahead(state, first + BLOCK)
        total[:size] = 0
        _fold(total, mail, starts, scales, first, size)
        if rule == ADAGRAD:
            _adagrad(block, past, total, gain, take, pull)
        else:
            _velocity(block, past, total, shrink, gain, carry, keep, take, pull)


@njit(nogil=True, cache=True)
def steps(
    rule: int,
    places: np.ndarray,
    mail: np.ndarray,
    ends: np.ndarray,
    starts: np.ndarray,
    scales: np.ndarray,
    numbers: np.ndarray,
) -> None:
    """A step of each of several shards, each on the messages from the end of those before it to its own.

    A place is: address of the weights, address of the state, size; `numbers` has a row for each shard.
    """
    first = 0
    for k in range(ends.size):
        weights, state = floats(places[k, 0], places[k, 2]), floats(places[k, 1], places[k, 2])
        step(rule, weights, state, mail, starts[first : ends[k]], scales[first : ends[k]], numbers[k])
        first = ends[k]


@njit(nogil=True, cache=True, inline="always")
def _fetch_ahead(values, first):  # type: ignore[no-untyped-def]
    """Begin with each page of a block that comes next."""
    for page in range(first, first + BLOCK, PAGE):
        prefetch(values, page)


@njit(nogil=True, cache=True)
def lessen(block, share):  # type: ignore[no-untyped-def]
    """Take a share of each weight away."""
    for i in range(block.size):
        block[i] -= share * block[i]


@njit(nogil=True, cache=True)
def _velocity(block, velocities, total, shrink, gain, carry, keep, take, pull):  # type: ignore[no-untyped-def]
    """The rules with a velocity: see `rules.Numbers`."""
    for i in range(block.size):
        weight, velocity = block[i], velocities[i]
        velocities[i] = keep * velocity + (take * total[i] + pull * weight)
        block[i] = weight - (carry * velocity + (gain * total[i] + shrink * weight))


@njit(nogil=True, cache=True)
def _adagrad(block, squares, total, rate, take, pull):  # type: ignore[no-untyped-def]
    """squares += take * gradient^2;  weights -= rate * gradient / (sqrt(squares) + 1e-8)."""
    for i in range(block.size):
        gradient = total[i] + pull * block[i]
        squares[i] += take * (gradient * gradient)
        block[i] -= rate * gradient / (np.sqrt(squares[i]) + np.float32(1e-8))


@njit(nogil=True, cache=True)
def add(total: np.ndarray, values: np.ndarray, scale: float) -> None:
    for i in range(total.size):
        total[i] += scale * values[i]


@njit(nogil=True, cache=True)
def update_ema(mean: np.ndarray, weights: np.ndarray, share: float) -> None:
    """mean += share * (weights - mean): a running average of the weights."""
    for i in range(mean.size):
        mean[i] += share * (weights[i] - mean[i])


@njit(nogil=True, cache=True)
def sparse_additive(
    weights: np.ndarray, state: np.ndarray, indices: np.ndarray, values: np.ndarray, rate: float
) -> None:
    for k in range(indices.size):
        weights[indices[k]] += values[k]


@njit(nogil=True, cache=True)
def sparse_descent(
    weights: np.ndarray, state: np.ndarray, indices: np.ndarray, values: np.ndarray, rate: float
) -> None:
    for k in range(indices.size):
        weights[indices[k]] -= rate * values[k]


@njit(nogil=True, cache=True)
def sparse_adagrad(
    weights: np.ndarray, state: np.ndarray, indices: np.ndarray, values: np.ndarray, rate: float
) -> None:
    for k in range(indices.size):
        i = indices[k]
        state[i] += values[k] * values[k]
        weights[i] -= rate * values[k] / (np.sqrt(state[i]) + np.float32(1e-8))


SPARSE_KERNELS = {"additive": sparse_additive, "descent": sparse_descent, "adagrad": sparse_adagrad}
