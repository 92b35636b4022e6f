"""Gradient buffers: gradients summed over images, from the replica that computes them into one push."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

import numpy as np
from numba import njit

from adam_mpi.config import Config
from adam_mpi.config.sections import MOST_BATCHES
from adam_mpi.model.parameters import Tensor
from adam_mpi.optimizer.rules import rule_of
from adam_mpi.sharding.batches import Batch
from adam_mpi.sharding.memory_layout import WorkerShards
from adam_mpi.sharding.push_protocol import Matrix, largest_push, matrices

MOST_PUSHES = 2
"""The most pushes whose images one buffer takes while servers are slow."""


@dataclass(frozen=True)
class BatchResult:
    """The result of a batch, or of a share of one, for the data rank that counts it."""

    phase: int
    number: int
    images: int
    sums: np.ndarray
    """The sums of the losses and of the metrics of the images; see `model.metrics`."""
    epoch: int = 0


def batch_result(batch: Batch, sums: np.ndarray) -> BatchResult:
    """Return the result of `batch`, whose images have the `sums` of losses and metrics."""
    return BatchResult(
        phase=batch.phase,
        number=batch.number,
        images=batch.ids.size,
        sums=sums,
        epoch=batch.epoch,
    )


def combine(parts: Sequence[BatchResult]) -> BatchResult:
    """Return the result of a batch from the results of its `parts`."""
    sums = np.sum([part.sums for part in parts], axis=0)
    return replace(parts[0], images=sum(part.images for part in parts), sums=sums)


@dataclass(frozen=True)
class Encoded:
    """The part of a push for one shard, encoded by a codec with error feedback."""

    words: np.ndarray
    finite: bool
    """Whether servers apply it; if not, the residual has nothing of it."""
    before: np.ndarray | None
    """The residual before this push, where a push may be taken back."""
    buffers: tuple[np.ndarray, ...] = ()
    """The memory of `words` and `before`."""


@dataclass
class GradientBuffer:
    """A sum of gradients, and what is known about it until its push is reported as done."""

    row: int
    """The row of the pool that `values` is."""
    values: np.ndarray
    """The sum of gradients over the worker's whole parameter vector, scaled by `StepScales.push`."""
    done: list[BatchResult] = field(default_factory=list)
    """The results of the batches that are in it."""
    factors: dict[str, "Factors"] = field(default_factory=dict)
    """Activations and errors of the layers that push them."""
    sequence: int = 0
    """The number of its push, counted by the worker."""
    clock: int = 0
    """The clock of its push."""
    pending: int = 0
    """Messages of this push that are not acknowledged yet."""
    encoded: dict[int, Encoded] = field(default_factory=dict)
    """Shard -> its part of the push as it was first sent. Kept until the whole push is acknowledged: what is sent again
    must be the same, because the residual has what it left out."""
    counted: bool = True
    """Whether its batches are reported when it is acknowledged; False for a clock that is computed again."""

    @property
    def images(self) -> int:
        """Return the number of images that are in it."""
        return sum(done.images for done in self.done)

    def full(self, images: int) -> bool:
        """Return whether it has `images` images, or as many batches as a message has room for the numbers of."""
        return self.images >= images or len(self.done) >= MOST_BATCHES

    def fits(self, images: int) -> bool:
        """Return whether there is room for the activations and errors of `images` more images."""
        return all(factors.count + images <= len(factors.activations) for factors in self.factors.values())


class Factors:
    """Activations and errors of a dense layer, a row for each image."""

    def __init__(self, images: int, inputs: int, outputs: int) -> None:
        """Make room for `images` images of a layer with `inputs` inputs and `outputs` outputs."""
        self.activations = np.zeros((images, inputs), np.float32)
        self.errors = np.zeros((images, outputs), np.float32)
        self.count = 0

    def add(self, activations: np.ndarray, errors: np.ndarray) -> None:
        """Append the factors of a block of images."""
        part = slice(self.count, self.count + len(activations))
        self.activations[part] = activations
        self.errors[part] = errors
        self.count = part.stop


def gradient_buffers(threads: int, copied: bool, staleness: float) -> int:
    """Return the number of buffers of a worker: for its `threads` and for pushes, or one per clock under way.

    It is twice as large where shards are `copied`, because an acknowledgement then takes twice as long.
    """
    return int(min(2 * threads + 2, staleness + 2)) * (2 if copied else 1)


class GradientPool:
    """Keep gradient buffers for the whole job, so that a push allocates nothing."""

    def __init__(self, count: int, size: int, factors: Mapping[str, Matrix], images: int) -> None:
        """Make `count` buffers of `size` parameters, with room for the `factors` of `images` images."""
        self.size = size
        self.values = np.zeros((count, size), np.float32)
        self.free: SimpleQueue[GradientBuffer] = SimpleQueue()
        self.waited = 0.0
        """The seconds that threads have waited for a buffer, summed over the threads."""
        for row, values in enumerate(self.values):
            kept = {layer: Factors(images, matrix.inputs, matrix.outputs) for layer, matrix in factors.items()}
            self.free.put(GradientBuffer(row, values, factors=kept))

    def take(self, wait: bool = False) -> GradientBuffer | None:
        """Return an empty buffer; if there is none, return None, or block until there is one if `wait`."""
        try:
            return self.free.get_nowait()
        except Empty:
            if not wait:
                return None
        began = time.perf_counter()
        taken = self.free.get()
        self.waited += time.perf_counter() - began
        return taken

    def give(self, buffer: GradientBuffer) -> None:
        """Empty `buffer` and put it back."""
        buffer.values[:] = 0
        buffer.done.clear()
        buffer.encoded.clear()
        buffer.counted = True
        for factors in buffer.factors.values():
            factors.count = 0
        self.free.put(buffer)


def worker_pool(config: Config, worker_shards: WorkerShards, threads: int, captured: Collection[str]) -> GradientPool:
    """Return the pool of a worker with `threads` threads, with factors of the layers that are `captured`."""
    memory_layout = worker_shards.memory_layout
    dense = {layer: matrix for layer, matrix in matrices(memory_layout.tensors).items() if layer in captured}
    count = gradient_buffers(threads, bool(memory_layout.peers.count), config.consistency.staleness)
    return GradientPool(count, worker_shards.size, dense, largest_push(config))


def takes_back(config: Config, strips: int) -> bool:
    """Return whether pushes may have to be taken back: those of an incomplete clock, and those of `strips` > 1."""
    return config.consistency.staleness == 0 or strips > 1


@dataclass(frozen=True)
class StepScales:
    """The factors of what a worker adds to weights and pushes: each addition is `target += scale * values`.

    With r the learning rate per image, which is the learning rate divided by `train.batch`:

    | scale     | addition                        | optimizer.where = server | optimizer.where = worker |
    | --------- | ------------------------------- | ------------------------ | ------------------------ |
    | weights   | local += weights * gradient     | -r                       | -r                       |
    | push      | push += push * gradient         | 1                        | -r                       |
    | predicted | local += predicted * push       | -r                       | 1                        |

    So `weights` is always `push * predicted`: local weights change by what the servers are expected to apply. Where the
    servers' rule is not predicted by descent, these two are 0: local weights change with pulls only.
    """

    weights: float
    push: float
    predicted: float

    @classmethod
    def at(cls, rate: float, config: Config, statistics: bool = False) -> "StepScales":
        """Return the scales for the learning rate `rate`; `statistics`: whether the model has running statistics.

        Descent would move those away from what they average: with them nothing is predicted.
        """
        step = -rate / config.train.batch
        if config.optimizer.where == "worker":
            return cls(weights=step, push=step, predicted=1.0)
        if statistics or not rule_of(config.optimizer).predicts:
            return cls(weights=0.0, push=1.0, predicted=0.0)
        return cls(weights=step, push=1.0, predicted=step)


@njit(nogil=True, cache=True)
def add_scaled(target: np.ndarray, values: np.ndarray, scale: float) -> None:
    """Add `scale * values` to `target`."""
    for i in range(values.size):
        target[i] += scale * values[i]


@njit(nogil=True, cache=True)
def renew(local: np.ndarray, pulled: np.ndarray, values: np.ndarray, rows: np.ndarray, scale: float) -> None:
    """Set `local` to `pulled` plus `scale` times what is being summed in these `rows` of the pool's `values`.

    `pulled` is overwritten. The blocks are small because what a thread adds to a block of `local` between the reading
    and the writing of it is lost.
    """
    for first in range(0, local.size, 256):
        last = min(first + 256, local.size)
        # Slices that begin at index 0 let the compiler use vectors.
        own = local[first:last]
        new = pulled[first:last]
        for row in rows:
            change = values[row, first:last]
            for i in range(new.size):
                new[i] += scale * change[i]
        for i in range(new.size):
            own[i] = new[i]


class Noise:
    """Draw noise for gradients, for studies of what the noise of asynchrony does."""

    def __init__(self, fraction: float, tensors: Sequence[Tensor], seed: int, member: int) -> None:
        """Draw noise of `fraction` times the root mean square of each tensor's gradient.

        The noise depends on `seed` and `member`, the number of the rank for life.
        """
        self.fraction = np.float32(fraction)
        self.tensors = tensors
        self.draw = np.random.Generator(np.random.Philox(key=[seed, member]))

    def add(self, gradient: np.ndarray) -> None:
        """Add noise to `gradient`, which has all `tensors`."""
        for tensor in self.tensors:
            part = gradient[tensor.offset : tensor.offset + tensor.size]
            size = np.sqrt(np.dot(part, part) / np.float32(tensor.size))
            part += self.fraction * size * self.draw.standard_normal(tensor.size, np.float32)
