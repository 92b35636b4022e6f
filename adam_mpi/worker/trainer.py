"""A trainer thread: computes batches on its copy of the weights that the threads of a worker share; never calls MPI."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from adam_mpi.base import trace
from adam_mpi.cluster.fault_injection import Injector
from adam_mpi.config.sections import MOST_BATCHES
from adam_mpi.model.graph_context import GraphContext
from adam_mpi.model.metrics import ACCURACY, MetricSet
from adam_mpi.model.network import Network
from adam_mpi.sharding.batches import Batch
from adam_mpi.worker.batch_filter import BatchFilter
from adam_mpi.worker.data_client import Slot
from adam_mpi.worker.diagnostics import NaNDetector
from adam_mpi.worker.gradient_buffer import (
    MOST_PUSHES,
    BatchResult,
    GradientBuffer,
    GradientPool,
    StepScales,
    batch_result,
)
from adam_mpi.worker.thread_weights import ThreadWeights


@dataclass
class TaskResult:
    """What a thread returns: the batch that it has computed, a full gradient buffer, or the error that ended a task."""

    thread: int
    done: BatchResult | None = None
    slot: Slot | None = None
    gradient: GradientBuffer | None = None
    error: BaseException | None = None


Task = Callable[["Trainer"], TaskResult]


class Trainer(threading.Thread):
    """Run tasks one after the other, and put their results into `results`."""

    def __init__(
        self,
        index: int,
        network: Network,
        copy: ThreadWeights,
        *,
        batch_filter: BatchFilter,
        pool: GradientPool,
        results: SimpleQueue[TaskResult],
        injector: Injector,
        metrics: MetricSet = ACCURACY,
    ) -> None:
        super().__init__(name=f"trainer-{index}", daemon=True)
        self.index = index
        self.copy = copy
        self.context = copy.context
        self.filter = batch_filter
        self.pool = pool
        self.results = results
        self.injector = injector
        self.metrics = metrics
        self.nan_detector = NaNDetector(network.shapes, network.form)
        self.buffer: GradientBuffer | None = None
        """Where the thread sums its gradients."""
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()
        self.waiting = 0
        """Tasks given whose results are not collected; counted by the main thread."""
        self.unwanted = 0
        """How many of them belong to a generation that has ended."""
        self.busy = 0.0
        """Seconds spent in tasks."""

    @property
    def gradient(self) -> np.ndarray:
        """Return the gradient of the round so far."""
        return self.copy.gradient

    def give(self, task: Task) -> None:
        """Queue `task`."""
        self.waiting += 1
        self.tasks.put(task)

    def capture(self, buffer: GradientBuffer, scale: float = 1.0) -> None:
        """Add the activations and errors of the block just computed to `buffer`, of the layers that push them.

        The errors are multiplied by `scale`, as the gradient was.
        """
        for layer, factors in buffer.factors.items():
            assert not isinstance(self.context, GraphContext), "graphs push gradients"
            activations, errors = self.context.factors(layer)
            factors.add(activations, errors if scale == 1 else errors * np.float32(scale))

    def measure(self, result: tuple[float, int], batch: Batch, training: bool) -> np.ndarray:
        """Return the sums of `batch`, which the context has just computed with `result`."""
        count = batch.ids.size
        return self.metrics.measure(result, lambda: self.context.outputs_of(count), batch.labels, training)

    def run(self) -> None:
        """Run tasks until there is a None among them."""
        while (task := self.tasks.get()) is not None:
            start = time.perf_counter()
            try:
                result = task(self)
            except BaseException as error:  # the main thread raises it and ends the job
                result = TaskResult(self.index, error=error)
            self.busy += time.perf_counter() - start
            self.results.put(result)


def train(batch: Batch, slot: Slot | None, scales: StepScales, *, images: int, largest: int) -> Task:
    """Return a task that computes `batch`, steps on the local weights, and hands the buffer over after `images` images.

    The buffer is handed over earlier where the factors of a batch of `largest` images, or the number of one more batch,
    would not fit: the last batch of an epoch is smaller than others, and need not be the last that a thread gets, and
    so is one with bad images.
    """

    def task(trainer: Trainer) -> TaskResult:
        copy = trainer.copy
        done = _compute(trainer, batch, copy.weights, copy.begin(), copy.options)
        scale = trainer.filter.apply(trainer.gradient) if trainer.filter.active and done.images else 1.0
        if trainer.buffer is None:
            # Faster threads may have taken all buffers there are.
            trainer.buffer = trainer.pool.take(wait=True)
        buffer = trainer.buffer
        assert buffer is not None, "the pool has a buffer per thread and some for pushes"
        buffer.done.append(done)
        trainer.capture(buffer, scale)
        full = buffer.full(images) or not buffer.fits(largest)
        copy.step(buffer.values, scales.weights, scales.push, last=full)
        gradient = _exchange_full(trainer, buffer, images) if full else None
        return TaskResult(trainer.index, done, slot, gradient)

    return task


def _exchange_full(trainer: Trainer, full: GradientBuffer, images: int) -> GradientBuffer | None:
    """Give the thread an empty buffer and return the `full` one; None if it continues to add to the full one.

    While every other buffer is under way, the thread adds to the full one: a full ring stops no thread. The limit is
    MOST_PUSHES * `images` images, because what servers cannot take comes too late to be of use, and adds up to steps
    that diverge. Nor does it add beyond the room for batch numbers, nor where factors are kept: those of all images
    would have to be kept.
    """
    wait = full.images >= MOST_PUSHES * images or bool(full.factors) or len(full.done) >= MOST_BATCHES
    empty = trainer.pool.take(wait)
    if empty is None:
        return None
    trainer.buffer = empty
    return full


def hand_over(scales: StepScales) -> Task:
    """Return a task that hands over what the thread has summed so far, however little."""

    def task(trainer: Trainer) -> TaskResult:
        buffer = trainer.buffer
        if buffer is None or not buffer.done:
            return TaskResult(trainer.index)
        trainer.copy.end(buffer.values, scales.weights, scales.push)
        trainer.buffer = None
        return TaskResult(trainer.index, gradient=buffer)

    return task


def compute(batch: Batch) -> Task:
    """Return a task that computes the gradients of `batch` into the thread's own array, for a step of all replicas."""

    def task(trainer: Trainer) -> TaskResult:
        return TaskResult(trainer.index, _compute(trainer, batch, trainer.copy.shared, True, {}))

    return task


def evaluate(batch: Batch, slot: Slot) -> Task:
    """Return a task that evaluates `batch` on the shared weights."""

    def task(trainer: Trainer) -> TaskResult:
        with trace.span("evaluate"):
            result = trainer.context.evaluate(trainer.copy.shared, batch.pixels, batch.labels)
            sums = trainer.measure(result, batch, training=False)
        trainer.injector.at("evaluate")
        return TaskResult(trainer.index, batch_result(batch, sums), slot)

    return task


def _compute(
    trainer: Trainer, batch: Batch, weights: np.ndarray, overwrite: bool, options: dict[str, bool]
) -> BatchResult:
    """Add the gradient of `batch` to the thread's, or `overwrite` it; return the result of the batch."""
    start = time.perf_counter()
    result = (0.0, 0)
    if batch.ids.size:
        with trace.span("kernels"):
            result = trainer.context.train(
                weights,
                trainer.gradient,
                batch.pixels,
                batch.labels,
                ids=batch.ids,
                epoch=batch.epoch,
                overwrite=overwrite,
                **options,
            )
        trainer.nan_detector.look(result[0], weights, batch)
    elif overwrite:
        trainer.gradient[:] = 0
    sums = trainer.measure(result, batch, training=True)
    trainer.injector.slow(time.perf_counter() - start)
    trainer.injector.at("compute")
    return batch_result(batch, sums)
