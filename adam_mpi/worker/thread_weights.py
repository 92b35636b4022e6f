"""A trainer thread's copy of its worker's weights: a thread relates to its worker as a replica relates to the servers.

Threads that all write the shared weights after every batch spend their time passing cache lines around. So a thread
takes a copy, steps on that, and adds its steps to the shared weights at the end of a round of batches. Layers too
large for a copy (`Network.uncopied`) are read from the shared weights, and change at the end of a round only: their
gradient and their step are then one pass over memory (`EngineContext.apply_fused`), which threads share as well.

All scales here are those of `gradient_buffer.StepScales`: `target += scale * values`.
"""

import numpy as np
from numba import njit

from adam_mpi.config import Config
from adam_mpi.model.engine.engine_context import EngineContext
from adam_mpi.model.network import Network

ROUND = 4
"""Batches between two additions to the shared weights."""


def batches(config: Config) -> int:
    """Return the most batches of a round; the last batch of a push ends it too."""
    return min(ROUND, -(-config.push.images // config.train.batch))


class ThreadWeights:
    """Hold the `weights` that a thread computes on with `context`, and the `gradient` summed over its round."""

    def __init__(self, network: Network, shared: np.ndarray, index: int, alone: bool, one_by_one: bool = False) -> None:
        """Copy from the `shared` weights for the thread `index`.

        If `alone` there is no copy, and every batch is a round: for a single thread, or where every batch is pushed.
        If the gradients of batches are wanted `one_by_one`, those of all layers are written to memory.
        """
        self.shared = shared
        self.gradient = np.zeros_like(shared)
        """What a batch's gradient is written to, or added to."""
        self.alone = alone
        self.one_by_one = one_by_one
        self.sum = np.zeros_like(shared) if one_by_one and not alone else self.gradient
        """The gradients of the round."""
        self.weights = shared if alone else np.zeros_like(shared)
        self.start = shared if alone else np.zeros_like(shared)
        """The weights at the start of the round."""
        self.context = network.context(shared)
        fused = () if one_by_one else network.fused_layers
        self.options = {"later": True} if fused else {}
        """The options of `context.train`."""
        self.ranges = _ranges(network.copied())
        """The spans that are copied."""
        self.summed = _ranges(network.spans_without(fused))
        """The spans that have a gradient in memory."""
        self.batches = 0
        """The batches of the round so far."""
        # The first rounds differ in length, so that threads do not end theirs together.
        self.length = ROUND - index % ROUND

    def begin(self) -> bool:
        """Prepare for a batch; return whether its gradient overwrites the one before.

        The first batch of a round begins with the shared weights.
        """
        if self.batches == 0 and not self.alone:
            take(self.shared, self.start, self.weights, self.ranges)
        return self.batches == 0 or self.one_by_one

    def step(self, total: np.ndarray, weight_scale: float, push_scale: float, last: bool = False) -> None:
        """Step after a batch on the copy, or end the round, at the latest with the `last` batch of a push.

        `total` is the gradient buffer; the scales are `weights` and `push` of StepScales.
        """
        if self.sum is not self.gradient:
            add_gradient(self.sum, self.gradient, self.batches == 0)
        self.batches += 1
        if self.alone or last or self.batches >= self.length:
            self.end(total, weight_scale, push_scale)
        else:
            step_copy(self.start, self.sum, self.weights, self.ranges, np.float32(weight_scale))

    def end(self, total: np.ndarray, weight_scale: float, push_scale: float) -> None:
        """Add the round, if there is one, to the shared weights and to `total`."""
        if not self.batches:
            return
        scales = (np.float32(weight_scale), np.float32(push_scale))
        apply_fused(self.shared, total, self.sum, self.summed, *scales)
        if isinstance(self.context, EngineContext):
            # The engine subtracts its first scale.
            self.context.apply_fused(total, -weight_scale, push_scale)
        self.batches = 0
        self.length = ROUND


def _ranges(spans: list[tuple[int, int]]) -> np.ndarray:
    return np.array(spans, np.int64).reshape(-1, 2)


# Loops run over slices from 0: with an index that might be negative the compiler uses no vectors, and takes 4-13 times
# as long.


@njit(nogil=True, cache=True)
def take(shared: np.ndarray, start: np.ndarray, weights: np.ndarray, ranges: np.ndarray) -> None:
    """Copy the same values to `start` and `weights`, although other threads change `shared` meanwhile."""
    for row in range(len(ranges)):
        part = slice(ranges[row, 0], ranges[row, 1])
        old = shared[part]
        begin = start[part]
        own = weights[part]
        for i in range(own.size):
            value = old[i]
            begin[i] = value
            own[i] = value


@njit(nogil=True, cache=True)
def add_gradient(total: np.ndarray, gradient: np.ndarray, first: bool) -> None:
    """Add `gradient` to `total`, or copy the `first` one."""
    for i in range(total.size):
        total[i] = gradient[i] if first else total[i] + gradient[i]


@njit(nogil=True, cache=True)
def step_copy(start: np.ndarray, gradient: np.ndarray, weights: np.ndarray, ranges: np.ndarray, scale: float) -> None:
    """Set `weights` to `start + scale * gradient`."""
    for row in range(len(ranges)):
        part = slice(ranges[row, 0], ranges[row, 1])
        begin = start[part]
        change = gradient[part]
        own = weights[part]
        for i in range(own.size):
            own[i] = begin[i] + scale * change[i]


@njit(nogil=True, cache=True)
def apply_fused(
    local: np.ndarray,
    total: np.ndarray,
    gradient: np.ndarray,
    ranges: np.ndarray,
    weight_scale: float,
    push_scale: float,
) -> None:
    """Add `push_scale * gradient` to `total` and `weight_scale * gradient` to `local`, in one pass over memory.

    Other threads add to `local` at the same time, without locks: a lost addition is a little noise.
    """
    for row in range(len(ranges)):
        part = slice(ranges[row, 0], ranges[row, 1])
        shared = local[part]
        summed = total[part]
        change = gradient[part]
        for i in range(shared.size):
            summed[i] += push_scale * change[i]
            shared[i] += weight_scale * change[i]
