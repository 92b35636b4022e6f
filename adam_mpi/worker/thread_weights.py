"""A trainer thread's copy of its node's weights: a thread is to its node what a replica is to the servers.

Threads that all write the shared weights after every batch spend their time passing cache lines around. So a thread
takes a copy, steps on that, and adds what it learnt to the shared weights at the end of a round of batches. Layers too
large for a copy (`Network.uncopied`) are read where they are shared, and change at the end of a round only: their
gradient and their step are one pass over memory then (`EngineContext.settle`), which threads share as well.
"""

import numpy as np
from numba import njit

from adam_mpi.config import Config
from adam_mpi.model.engine.context import EngineContext
from adam_mpi.model.network import Network

ROUND = 4
"""Batches between two additions to the shared weights."""


def batches(config: Config) -> int:
    """The most of a round: a push ends it too."""
    return min(ROUND, -(-config.push.images // config.train.batch))


class ThreadWeights:
    """`weights` is what the thread computes on with `context`, `gradient` the sum over the batches of its round.

    `alone`: no copy, and every batch is a round: for a single thread, or where every batch is pushed.
    """

    def __init__(self, network: Network, shared: np.ndarray, index: int, alone: bool) -> None:
        self.shared, self.gradient, self.alone = shared, np.zeros_like(shared), alone
        self.weights, self.start = (shared, shared) if alone else (np.zeros_like(shared), np.zeros_like(shared))
        self.context = network.context(shared)
        self.options = {"later": True} if network.settled else {}
        """For `context.train`."""
        self.ranges, self.summed = _ranges(network.copied()), _ranges(network.spans_without(network.settled))
        """Of what is copied, and of what has a gradient in memory."""
        self.batches = 0
        """Of the round so far."""
        # The first rounds differ in length, so that threads do not end theirs together.
        self.length = ROUND - index % ROUND

    def begin(self) -> bool:
        """Before a batch; whether it is the first of a round, which begins with the shared weights as they are."""
        if self.batches == 0 and not self.alone:
            take(self.shared, self.start, self.weights, self.ranges)
        return self.batches == 0

    def step(self, total: np.ndarray, factor: float, unit: float, last: bool = False) -> None:
        """After a batch: step on the copy, or end the round, at the latest with the last batch of a push."""
        self.batches += 1
        if self.alone or last or self.batches >= self.length:
            self.end(total, factor, unit)
        else:
            ahead(self.start, self.gradient, self.weights, self.ranges, np.float32(factor))

    def end(self, total: np.ndarray, factor: float, unit: float) -> None:
        """Add the round, if there is one, to the shared weights and to the contribution."""
        if self.batches:
            settle(self.shared, total, self.gradient, self.summed, np.float32(factor), np.float32(unit))
            if isinstance(self.context, EngineContext):
                self.context.settle(total, factor, unit)
            self.batches, self.length = 0, ROUND


def _ranges(spans: list[tuple[int, int]]) -> np.ndarray:
    return np.array(spans, np.int64).reshape(-1, 2)


# Loops run over slices from 0: with an index that might be negative the compiler uses no vectors, and takes 4-13 times
# as long.


@njit(nogil=True, cache=True)
def take(shared: np.ndarray, start: np.ndarray, weights: np.ndarray, ranges: np.ndarray) -> None:
    """The same values into both, though others change them meanwhile."""
    for row in range(len(ranges)):
        part = slice(ranges[row, 0], ranges[row, 1])
        old, begin, own = shared[part], start[part], weights[part]
        for i in range(own.size):
            value = old[i]
            begin[i] = value
            own[i] = value


@njit(nogil=True, cache=True)
def ahead(start: np.ndarray, gradient: np.ndarray, weights: np.ndarray, ranges: np.ndarray, factor: float) -> None:
    """The weights that the gradient of the round so far leads to."""
    for row in range(len(ranges)):
        part = slice(ranges[row, 0], ranges[row, 1])
        begin, change, own = start[part], gradient[part], weights[part]
        for i in range(own.size):
            own[i] = begin[i] - factor * change[i]


@njit(nogil=True, cache=True)
def settle(
    local: np.ndarray, total: np.ndarray, gradient: np.ndarray, ranges: np.ndarray, factor: float, unit: float
) -> None:
    """Add `unit` times a gradient to the contribution, and the step it predicts to the local weights.

    Other threads do the same to `local` at the same time, without locks: a lost addition is a little noise.
    """
    for row in range(len(ranges)):
        part = slice(ranges[row, 0], ranges[row, 1])
        shared, summed, change = local[part], total[part], gradient[part]
        for i in range(shared.size):
            summed[i] += unit * change[i]
            shared[i] -= factor * change[i]
