"""A contribution: gradients summed over images, on their way from a trainer thread into one push."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

import numpy as np
from numba import njit

from adam_mpi.config import Config
from adam_mpi.config.checks import MOST_BATCHES
from adam_mpi.model.parameters import Tensor
from adam_mpi.sharding.factors import Matrix
from adam_mpi.transport.batch_message import Batch

MOST_PUSHES = 2
"""How many pushes' images one contribution takes at the most, while servers are slow."""


@dataclass(frozen=True)
class BatchResult:
    """A batch (or a share of one) that has been computed, for the data rank that counts it."""

    phase: int
    number: int
    images: int
    loss: float
    correct: int
    epoch: int = 0


def done_with(batch: Batch, loss: float, correct: int) -> BatchResult:
    return BatchResult(batch.phase, batch.number, batch.labels.size, float(loss), int(correct), batch.epoch)


def together(parts: Sequence[BatchResult]) -> BatchResult:
    """Parts of one batch."""
    totals = {name: sum(getattr(part, name) for part in parts) for name in ("images", "loss", "correct")}
    return replace(parts[0], **totals)


@dataclass(frozen=True)
class Encoded:
    """The part of a push for one shard, as a codec with error feedback has encoded it."""

    words: np.ndarray
    finite: bool
    """Whether it is to be applied; else the residual has nothing of it."""
    before: np.ndarray | None
    """The residual as it was before, where a push may be taken back."""
    buffers: tuple[np.ndarray, ...] = ()
    """Where all that lies."""


@dataclass
class GradientBuffer:
    row: int
    """Its place in the pool."""
    values: np.ndarray
    """Sum of gradients, over the whole flat parameter vector."""
    done: list[BatchResult] = field(default_factory=list)
    factors: dict[str, "Factors"] = field(default_factory=dict)
    """Activations and errors of the layers that push them."""
    sequence: int = 0
    clock: int = 0
    pending: int = 0
    """Messages of this push that are not acknowledged yet."""
    encoded: dict[int, Encoded] = field(default_factory=dict)
    """Shard -> its part of the push as it was first sent. Kept until the whole push is acknowledged: what is sent again
    must be the same, as the residual has what it left out."""
    counted: bool = True
    """Whether its batches are reported when it is acknowledged: not those of a clock that is computed again."""

    @property
    def images(self) -> int:
        return sum(done.images for done in self.done)

    def full(self, images: int) -> bool:
        """Whether it has so many images, or as many batches as a message has room for the numbers of."""
        return self.images >= images or len(self.done) >= MOST_BATCHES

    def fits(self, images: int) -> bool:
        """Whether there is room for the activations and errors of so many more."""
        return all(factors.count + images <= len(factors.activations) for factors in self.factors.values())


class Factors:
    """Activations and errors of a dense layer, image by image, with room for so many images."""

    def __init__(self, images: int, inputs: int, outputs: int) -> None:
        self.activations = np.zeros((images, inputs), np.float32)
        self.errors = np.zeros((images, outputs), np.float32)
        self.count = 0

    def add(self, activations: np.ndarray, errors: np.ndarray) -> None:
        """Take in the factors of a block of images."""
        part = slice(self.count, self.count + len(activations))
        self.activations[part], self.errors[part] = activations, errors
        self.count = part.stop


def gradient_buffers(threads: int, copied: bool, staleness: float) -> int:
    """How many a worker has: some for its threads, some under way, or one for each clock that may be under way.

    Twice as many where there are copies of shards, because an acknowledgement then takes twice as long.
    """
    return int(min(2 * threads + 2, staleness + 2)) * (2 if copied else 1)


class GradientPool:
    """Contributions for the life of the job, so that a push allocates nothing."""

    def __init__(self, count: int, size: int, matrices: Mapping[str, Matrix], images: int) -> None:
        self.values = np.zeros((count, size), np.float32)
        self.free: SimpleQueue[GradientBuffer] = SimpleQueue()
        self.waited = 0.0
        """Seconds in which threads waited for one to come back, all threads together."""
        for row, values in enumerate(self.values):
            factors = {layer: Factors(images, m.inputs, m.outputs) for layer, m in matrices.items()}
            self.free.put(GradientBuffer(row, values, factors=factors))

    def take(self, wait: bool = False) -> GradientBuffer | None:
        try:
            return self.free.get_nowait()
        except Empty:
            if not wait:
                return None
        began = time.perf_counter()
        taken = self.free.get()
        self.waited += time.perf_counter() - began
        return taken

    def give(self, contribution: GradientBuffer) -> None:
        contribution.values[:] = 0
        contribution.done.clear()
        contribution.encoded.clear()
        contribution.counted = True
        for factors in contribution.factors.values():
            factors.count = 0
        self.free.put(contribution)


@njit(nogil=True, cache=True)
def renew(local: np.ndarray, pulled: np.ndarray, values: np.ndarray, rows: np.ndarray, factor: float) -> None:
    """local = pulled + the steps predicted for what is being summed up in these rows of the pool.

    In small blocks: what a thread adds to a block between our reading and our writing of it is lost.
    """
    for first in range(0, local.size, 256):
        last = min(first + 256, local.size)
        # Slices from 0, for the compiler to use vectors (see `copy`).
        own, new = local[first:last], pulled[first:last]
        for row in rows:
            change = values[row, first:last]
            for i in range(new.size):
                new[i] -= factor * change[i]
        for i in range(new.size):
            own[i] = new[i]


def takes_back(config: Config, strips: int) -> bool:
    """Whether pushes may have to be taken back: those of an incomplete clock, and those of strips."""
    return config.consistency.staleness == 0 or strips > 1


@njit(nogil=True, cache=True)
def descend(weights: np.ndarray, gradient: np.ndarray, factor: float) -> None:
    """A step down the gradient, which is left as it is."""
    for i in range(gradient.size):
        weights[i] -= factor * gradient[i]


class Noise:
    def __init__(self, fraction: float, tensors: Sequence[Tensor], seed: int, member: int) -> None:
        """`fraction`: of the root mean square of each tensor's gradient."""
        self.fraction, self.tensors = np.float32(fraction), tensors
        self.draw = np.random.Generator(np.random.Philox(key=[seed, member]))

    def add(self, gradient: np.ndarray) -> None:
        for tensor in self.tensors:
            part = gradient[tensor.offset : tensor.offset + tensor.size]
            size = np.sqrt(np.dot(part, part) / np.float32(tensor.size))
            part += self.fraction * size * self.draw.standard_normal(tensor.size, np.float32)
