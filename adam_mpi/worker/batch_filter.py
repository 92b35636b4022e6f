"""What a trainer thread makes of the gradient of a batch before it uses it: clipped, and with the thread's velocity.

A push of `momentum * velocity + gradient`, to which servers apply plain descent, is Nesterov's momentum for a thread
alone. For many threads it stays stable where one velocity on the servers does not, because no thread's velocity grows
by the late gradients of others: Hakimi et al., Taming Momentum in a Distributed Asynchronous Environment, 2019.
"""

import math
from collections.abc import Sequence

import numpy as np
from numba import njit

from adam_mpi.config import Config
from adam_mpi.optimizer.groups import STATISTICS, GroupSpan


class BatchFilter:
    """Clip the gradient of each batch of one thread, and keep the thread's `velocity`."""

    def __init__(self, config: Config, size: int, spans: Sequence[GroupSpan]) -> None:
        """Prepare for gradients of `size` parameters, summed over the images of a batch.

        Running statistics of a model are neither measured nor changed; frozen parameters get no gradient.
        """
        optimizer = config.optimizer
        stepped = [(s.start, s.stop) for s in spans if not s.group.frozen and s.group is not STATISTICS]
        self.ranges = np.array(stepped, np.int64).reshape(-1, 2)
        self.frozen = [slice(span.start, span.stop) for span in spans if span.group.frozen]
        self.limit = clip_limit(config) * config.train.batch
        self.momentum = optimizer.momentum if keeps_velocity(config) else 0.0
        self.velocity = np.zeros(size if self.momentum else 0, np.float32)
        self.clipped = 0
        """The batches whose gradient was longer than the limit."""

    @property
    def active(self) -> bool:
        """Return whether a gradient may be changed."""
        return bool(self.momentum or self.frozen) or self.limit < math.inf

    def apply(self, gradient: np.ndarray) -> float:
        """Replace `gradient` by what is pushed; return what it was multiplied by to be clipped.

        A gradient that is not finite stays as it is, for the servers to refuse, and does not enter the velocity.
        """
        for part in self.frozen:
            gradient[part] = 0
        norm = math.sqrt(squared_norm(gradient, self.ranges))
        if not math.isfinite(norm):
            return 1.0
        scale = min(1.0, self.limit / norm) if norm else 1.0
        self.clipped += scale < 1
        if self.momentum:
            add_velocity(gradient, self.velocity, self.ranges, np.float32(scale), np.float32(self.momentum))
        elif scale < 1:
            multiply(gradient, self.ranges, np.float32(scale))
        return scale


def keeps_velocity(config: Config) -> bool:
    """Return whether trainer threads keep velocities."""
    optimizer = config.optimizer
    return bool(optimizer.momentum) and optimizer.momentum_where == "replica"


def clip_limit(config: Config) -> float:
    """Return the largest norm of a mean gradient in asynchronous training, where 0 is not decided yet: no limit."""
    limited = config.asynchronous and config.optimizer.clip_norm and not config.inject.conserve
    return config.optimizer.clip_norm if limited else math.inf


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def squared_norm(values: np.ndarray, ranges: np.ndarray) -> float:
    """Return the sum of the squares of `values` in `ranges`."""
    total = 0.0
    for row in range(len(ranges)):
        part = values[ranges[row, 0] : ranges[row, 1]]
        for i in range(part.size):
            total += part[i] * part[i]
    return total


@njit(nogil=True, cache=True)
def multiply(gradient: np.ndarray, ranges: np.ndarray, scale: float) -> None:
    """Multiply `gradient` by `scale` in `ranges`."""
    for row in range(len(ranges)):
        part = gradient[ranges[row, 0] : ranges[row, 1]]
        for i in range(part.size):
            part[i] *= scale


@njit(nogil=True, cache=True)
def add_velocity(gradient: np.ndarray, velocity: np.ndarray, ranges: np.ndarray, scale: float, momentum: float) -> None:
    """Add `scale * gradient` to `momentum * velocity`, and set `gradient` to their sum in Nesterov's form."""
    for row in range(len(ranges)):
        part = gradient[ranges[row, 0] : ranges[row, 1]]
        past = velocity[ranges[row, 0] : ranges[row, 1]]
        for i in range(part.size):
            own = scale * part[i]
            kept = momentum * past[i] + own
            past[i] = kept
            part[i] = own + momentum * kept
