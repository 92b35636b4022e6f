"""The apply kernels: sum the gradients that have arrived for a run of parameters and take optimizer steps.

Kernels work block by block, so that each block of weights and state is read and written once, while it is in a near
cache, however many pushes there are. `memory` holds the gradients as float32 (it is the mailbox, or a buffer); `starts`
are their offsets in it. They are taken in that order, each times its element of `scales`.
"""

import numpy as np
from numba import njit

from adam_mpi.base.native import address, floats, prefetch
from adam_mpi.optimizer.rule_kernels import ADDITIVE, DESCENT, STATES, take_step

PAGE = 1024  # float32 in a page of memory
BLOCK = 4 * PAGE
Place = tuple[int, int, int, int]
"""Address of the weights, address of the first state vector, bytes from one state vector to the next, size."""


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


def place(weights: np.ndarray, states: np.ndarray, part: slice = slice(None)) -> Place:
    """Return where `part` of a shard lies; `states` has a state vector in each row."""
    first, stop, _ = part.indices(weights.size)
    whole = (address(weights), address(states), 4 * weights.size, weights.size)
    return part_of_place(whole, first, stop - first)


def part_of_place(place: Place, first: int, size: int) -> Place:
    """Return where `size` parameters lie, the first of which is parameter `first` of those at `place`."""
    weights, states, stride, _ = place
    return weights + 4 * first, states + 4 * first, stride, size


@njit(nogil=True, cache=True)
def steps(
    rule: int,
    places: np.ndarray,
    memory: np.ndarray,
    ends: np.ndarray,
    starts: np.ndarray,
    scales: np.ndarray,
    row_ends: np.ndarray,
    rows: np.ndarray,
) -> None:
    """Step several runs of parameters; run `k` takes the messages from `ends[k - 1]` to `ends[k]`.

    A row of `places` is a `Place`. Run `k` has the coefficients `rows` from `row_ends[k - 1]` to `row_ends[k]`: one row
    for the sum of its messages, or a row for each of them.
    """
    first = 0
    row = 0
    for k in range(ends.size):
        chosen = rows[row : row_ends[k]]
        _step_run(rule, places[k], memory, starts[first : ends[k]], scales[first : ends[k]], chosen)
        first = ends[k]
        row = row_ends[k]


def step(
    rule: int,
    weights: np.ndarray,
    states: np.ndarray,
    memory: np.ndarray,
    starts: np.ndarray,
    scales: np.ndarray,
    rows: np.ndarray,
) -> None:
    """Step one whole shard; see `steps`."""
    places = np.array([place(weights, states)], np.int64)
    steps(rule, places, memory, np.array([starts.size]), starts, scales, np.array([len(rows)]), rows)


@njit(nogil=True, cache=True)
def _step_run(rule, place, memory, starts, scales, rows):  # type: ignore[no-untyped-def]
    """Step one run of parameters; without a state, gradients are folded straight into the weights."""
    weights = floats(place[0], place[3])
    shrink = rows[0, 0]
    factors = -rows[0, 1] * scales if rule == DESCENT else scales
    total = np.empty(BLOCK, weights.dtype)
    for first in range(0, weights.size, BLOCK):
        size = min(BLOCK, weights.size - first)
        block = weights[first : first + size]
        _fetch_ahead(weights, first + BLOCK)
        if rule == ADDITIVE or rule == DESCENT:
            if shrink != 0:
                shrink_weights(block, shrink)
            _fold(block, memory, starts, factors, first, size)
            continue
        for state in range(STATES[rule]):
            _fetch_ahead(floats(place[1] + state * place[2], place[3]), first + BLOCK)
        past = place[1] + 4 * first
        if rows.shape[0] == starts.size:
            for k in range(starts.size):
                source = memory[starts[k] + first :][:size]
                take_step(rule, block, past, place[2], source, scales[k], rows[k])
        else:
            total[:size] = 0
            _fold(total, memory, starts, scales, first, size)
            take_step(rule, block, past, place[2], total[:size], np.float32(1), rows[0])


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
def add(total: np.ndarray, values: np.ndarray, scale: float) -> None:
    """Add `scale` times `values` to `total`."""
    for i in range(total.size):
        total[i] += scale * values[i]
